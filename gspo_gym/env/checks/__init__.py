"""Checks of an environment: contract, play, cost, leaks, and tricks that must not score."""
