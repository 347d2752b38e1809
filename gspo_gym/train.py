"""`python -m gspo_gym.train CONFIG.toml [section.key=value ...]`: train a model as a config file says."""

from gspo_gym.cli.train import main

if __name__ == "__main__":
    raise SystemExit(main())
