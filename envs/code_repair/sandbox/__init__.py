"""Programs that a model wrote, run confined."""
