"""`python -m gspo_gym.cli`, for when the script `gspo-gym` is not on the path."""

from gspo_gym.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
