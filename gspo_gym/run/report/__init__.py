"""The progress and the final report of a run, for people."""
