"""Judges: another model, a service or a function reads an episode and scores it against a rubric."""
