"""Environments over the network: served to other trainers. The clients' side is in `env/adapters`."""
