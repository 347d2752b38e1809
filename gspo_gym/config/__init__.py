"""Read a configuration file into a checked `RunConfig`, without torch. Begin reading at `run_config.py`."""
