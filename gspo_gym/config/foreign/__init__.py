"""Translate settings files of other trainers into ours, and report every change of meaning; see `draft.py`."""
