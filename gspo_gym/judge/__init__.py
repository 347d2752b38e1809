"""Judges: score an episode against a rubric, by another model, a service or a function."""
