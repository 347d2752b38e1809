"""The engine in this process: batched sampling from the transformers model that is trained."""
