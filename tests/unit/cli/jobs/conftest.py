"""A jobs service that starts nothing by itself, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from served_jobs import Client, IdleJobs

from gspo_gym.remote.serving import BackgroundServer


@pytest.fixture
def served(tmp_path: Path) -> IdleJobs:
    return IdleJobs(tmp_path)


@pytest.fixture
def client(served: IdleJobs) -> Iterator[Client]:
    with BackgroundServer(served.guarded) as server:
        yield Client(server.url)
