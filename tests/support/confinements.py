"""The confinements of model-written programs that work on this machine, and a fixture that plays a test under each."""

from __future__ import annotations

import os

import pytest
from gspo_gym_envs.code_repair.sandbox import confinement as confinement_module
from gspo_gym_envs.code_repair.sandbox import run as sandbox
from gspo_gym_envs.code_repair.sandbox.confinement import Confinement

MECHANISMS = (
    Confinement("namespaces", is_other_user=True),
    Confinement("user namespace"),
    Confinement("landlock", is_other_user=True),
    Confinement("landlock"),
)


def works_here(how: Confinement) -> bool:
    return (not how.is_other_user or os.geteuid() == 0) and confinement_module._problem_of(how) is None


# Those of another machine are cases there, and none here.
@pytest.fixture(
    params=[how for how in MECHANISMS if works_here(how)],
    ids=lambda how: f"{how.mechanism}, another user" if how.is_other_user else how.mechanism,
)
def mechanism(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Confinement:
    """A confinement that works here, which is used in the place of the best one."""
    how: Confinement = request.param
    monkeypatch.setattr(sandbox, "confinement", lambda: how)
    return how
