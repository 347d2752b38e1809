"""Help for authors of environments: `env new` writes a package, `env card` describes any environment."""
