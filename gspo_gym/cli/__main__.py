"""`python -m gspo_gym.cli`: the command `gspo-gym` where its script is not on the path."""

from gspo_gym.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
