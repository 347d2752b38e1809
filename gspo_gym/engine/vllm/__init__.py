"""vLLM in this process as an engine, and the transfer of weights into it."""
