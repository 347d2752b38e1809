"""A stand-in for skyrl-gym: its interface as version 0.4.0 has it, and three tiny environments."""

from .envs.registration import make, register

__all__ = ["make", "register"]
