"""Checks that say in sentences where a run fails, and which key to change."""
