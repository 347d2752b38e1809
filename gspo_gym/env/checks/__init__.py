"""Checks of environments: contract, play, cost, leaks, and tricks that must not score."""
