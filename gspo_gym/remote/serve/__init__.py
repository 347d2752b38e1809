"""Serve our environments to other trainers, as task apps and over OpenEnv's protocol."""
