"""The command `gspo-gym`, with one module for each group of commands."""
