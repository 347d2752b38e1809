"""SqlAnalyst: answer a business question over a small generated SQLite database by calling tools."""
