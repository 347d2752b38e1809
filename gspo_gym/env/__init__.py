"""All that an environment author needs: subclass `TextEnv` or `ToolEnv`, register it, check it.

This package and `gspo_gym.types` are the only parts of the library that an environment may import; nothing here loads
torch or a tokenizer.
"""
