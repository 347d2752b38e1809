"""Environments in worker processes, and the sandbox for code that a model wrote."""
