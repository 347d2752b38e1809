"""Settings files of other trainers -> ours, with every change of meaning said aloud; see `draft.py`."""
