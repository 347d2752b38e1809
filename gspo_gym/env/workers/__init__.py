"""Worker processes and threads for environments, and the sandbox for model-written code."""
