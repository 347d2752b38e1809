"""`python -m gspo_gym.evaluate CONFIG.toml [section.key=value ...]`: play a config's held-out episodes."""

from gspo_gym.cli.evaluate import main

if __name__ == "__main__":
    raise SystemExit(main())
