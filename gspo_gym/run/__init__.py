"""A training run and its folder: the loop, what it collects and what it records."""
