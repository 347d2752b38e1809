"""A search over runs: many values of a configuration, each a run of its own. Begin reading at `command.py`."""
