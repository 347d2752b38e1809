"""The configurations that the package holds: `gspo-gym train quickstart` finds quickstart.toml here."""
