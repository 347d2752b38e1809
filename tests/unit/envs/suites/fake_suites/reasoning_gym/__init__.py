"""A stand-in for reasoning-gym: its interface as version 0.1.23 has it, and four tiny generators.

What it has in common with the real one: entry k of seed 0 is entry 0 of seed k, some generators prepare lists and have
as many entries as their size, some raise on answers that they cannot read, and some entries have no answer.
"""

from . import factory, utils
from .factory import create_dataset

__all__ = ["create_dataset", "factory", "utils"]
