"""Several engines as one, and engines that are replaced after a crash."""
