"""OpenAI-compatible gateway that records the tokens of agents with a loop of their own."""
