"""Other projects' environments, one module for each suite; none of their packages is imported before one is made."""
