"""The dedicated reference of a configuration, where Ray is not installed; `tests/cluster` has runs with one."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo_gym.config.build import reference as build
from gspo_gym.config.build.reference import check_reference, dedicated_reference
from gspo_gym.config.run_config import RunConfig
from gspo_gym.errors import ConfigError, MissingExtraError
from gspo_gym.policy.load import load_policy
from tests.support.local_ray import LocalRay
from tests.support.reference_runs import make_config


def config_of(folder: Path, placement: str) -> RunConfig:
    return make_config(folder, reference={"placement": placement})


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec: Any = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find_spec(name))


@pytest.mark.usefixtures("no_ray")
def test_without_ray_a_dedicated_reference_is_refused_at_once(tmp_path: Path) -> None:
    config = config_of(tmp_path, "dedicated")
    with pytest.raises(MissingExtraError, match=r"pip install 'gspo-gym\[ray\]'"):
        check_reference(config)
    with (
        pytest.raises(MissingExtraError, match="Ray"),
        dedicated_reference(config, load_policy("tiny:qwen3-64"), "cpu"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_ray")
def test_a_shared_reference_needs_no_ray(tmp_path: Path) -> None:
    config = config_of(tmp_path, "shared")
    check_reference(config)
    with dedicated_reference(config, load_policy("tiny:qwen3-64"), "cpu") as reference:
        assert reference is None
    assert list(tmp_path.iterdir()) == []


def test_it_has_half_an_hour_to_come_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The port, the interval and the patience of the hosted trainer's server are read and change nothing."""
    ray, joined_at = LocalRay(), []

    @contextlib.contextmanager
    def joined(address: str | None) -> Iterator[LocalRay]:
        joined_at.append(address)
        yield ray

    monkeypatch.setattr(build, "joined", joined)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:7")
    policy = load_policy("tiny:qwen3-64")
    given = {"placement": "dedicated", "health_max_wait_s": 11, "port": 8765, "health_interval_ms": 20}
    with dedicated_reference(make_config(tmp_path, reference=given), policy, "cpu", 1) as reference:
        assert reference is not None
        assert reference.pid == os.getpid()
        assert not (tmp_path / "test/reference").exists(), "the actor has read it"
    assert joined_at == ["127.0.0.1:7"]
    assert ray.timeouts == [1800.0]


def test_what_is_no_address_of_a_head_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    expected = r"^RAY_ADDRESS: expected HOST:PORT of Ray's head, got 'http://127\.0\.0\.1:8265'$"
    with (
        pytest.raises(ConfigError, match=expected),
        dedicated_reference(config_of(tmp_path, "dedicated"), load_policy("tiny:qwen3-64"), "cpu"),
    ):
        pass
