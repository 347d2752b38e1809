"""Engines: token prompts in, completions out."""
