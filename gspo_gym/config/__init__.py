"""A configuration file -> a checked `RunConfig`; imports no torch. Begin reading at `run_config.py`."""
