"""Two verifiers environments as one. Imported by `verifiers.load_environment` in the tests."""

from __future__ import annotations

from typing import Any


def load_environment(extra: str = "") -> Any:
    """The sums and the guesses, in turn as their rows come."""
    import vf_guess
    import vf_sums
    from verifiers.envs.env_group import EnvGroup

    envs = [vf_sums.load_environment(num_rows=2, extra=extra), vf_guess.load_environment(high=2)]
    return EnvGroup(envs=envs, env_names=["sums", "guesses"])
