"""A frozen model in a separate process, which scores token ids for the KL term."""
