"""A frozen model in a process of its own, which scores token ids for the KL term."""
