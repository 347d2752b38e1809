"""A stand-in for gem-llm: its interface as version 0.1.0 has it, and games that seed the process's generators."""

from .envs.registration import make

__all__ = ["make"]
