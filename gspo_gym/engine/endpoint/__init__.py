"""Engines behind an OpenAI-compatible completions endpoint."""
