"""The command `gspo-gym`, one module for a group of commands."""
