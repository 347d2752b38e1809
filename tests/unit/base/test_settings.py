"""Keys are read from the variable that is named, and from nowhere else."""

from __future__ import annotations

import pytest

from gspo_gym.base.settings import read_key
from gspo_gym.errors import ConfigError


def test_a_key_is_what_its_variable_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANK_KEY", "k-1")
    assert read_key("BANK_KEY", "--api-key-env") == "k-1"
    assert read_key(None, "--api-key-env") is None


def test_an_empty_variable_holds_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANK_KEY", "")
    with pytest.raises(ConfigError, match=r"bank\.api_key_env: expected a key in the variable BANK_KEY, it is not set"):
        read_key("BANK_KEY", "bank.api_key_env")
