"""Everything for an environment's author: subclass `TextEnv` or `ToolEnv`, register it, check it.

An environment may import this package and `gspo_gym.types`, and no other part of the library. Nothing here loads torch
or a tokenizer.
"""
