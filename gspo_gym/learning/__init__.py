"""Trajectories become gradient steps."""
