"""Environments, chat and engines become trajectories."""
