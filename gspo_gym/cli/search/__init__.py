"""Search over runs: try many values of some keys, each in a separate run. Begin reading at `command.py`."""
