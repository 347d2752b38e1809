"""CodeRepair: edit a small Python file until its tests pass."""
