"""A run on several GPUs and machines: what stands where and fits there, learner ranks, a dedicated reference."""
