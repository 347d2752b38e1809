"""Progress of a run and its final report, for people."""
