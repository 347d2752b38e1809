"""The OpenAI-compatible gateway that captures the tokens of agents which drive themselves."""
