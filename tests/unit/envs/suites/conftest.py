"""Stand-ins of other projects' packages, found while a test asks for them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SUITES = ("reasoning_gym", "gem", "skyrl_gym", "omegaconf")


@pytest.fixture
def fake_suites(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The packages of `fake_suites` can be imported, in the place of real ones that may be installed."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "fake_suites"))
    known = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in SUITES}
    for name in known:
        del sys.modules[name]
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in SUITES]:
        del sys.modules[name]
    sys.modules.update(known)
