"""Many episodes at once: each is what its seed says, whoever plays beside it and wherever it runs.

Mixed environments, in threads, in the event loop and in worker processes, played twice with different concurrency and
in a different order: the transcripts, rewards and their parts are the same, episode by episode.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gspo_gym.env.playing import Playthrough, play_in
from gspo_gym.env.session import open_session
from gspo_gym.env.workers.isolation import IsolatedFactory, isolated_factory

# One that awaits, one that seeds and draws from the generators of the whole process: wrong anywhere but in a process.
SUBJECT = """
import asyncio
import random

import numpy as np

from gspo_gym.env.core import TextEnv


class Awaits(TextEnv):
    async def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 4
        return await self.draw(), {}

    async def step(self, action):
        self.left -= 1
        return await self.draw() + action, float(self.np_random.random()), self.left == 0, False, {}

    async def draw(self):
        for _ in range(int(self.np_random.integers(4))):
            await asyncio.sleep(0)
        return str(self.np_random.random())


class DrawsGlobally(TextEnv):
    def reset(self, *, seed=None, options=None):
        random.seed(seed)
        self.left = 4
        return f"{random.random()} {np.random.random()}", {}

    def step(self, action):
        self.left -= 1
        return f"{random.random()} {action}", np.random.random(), self.left == 0, False, {}


def numbers(env, rng):
    return lambda messages: str(rng.integers(100))


Awaits.policies = DrawsGlobally.policies = {"random": numbers}
"""


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[IsolatedFactory]]:
    """Factories of what is played, the bundled ones in threads and in processes."""
    folder: Path = tmp_path_factory.mktemp("determinism")
    (folder / "determinism_subject.py").write_text(SUBJECT, encoding="utf-8")
    sys.path.insert(0, str(folder))
    subject: Any = __import__("determinism_subject")
    yield [
        isolated_factory("GuessNumber", {"high": 30}, "thread"),
        isolated_factory("FrozenLake", isolation="thread"),
        isolated_factory("SqlAnalyst", {"level": "tiny"}, "thread"),
        isolated_factory(subject.Awaits, isolation="thread"),
        isolated_factory("GuessNumber", {"high": 30}, "process"),
        isolated_factory("FrozenLake", isolation="process"),
        isolated_factory("SqlAnalyst"),
        isolated_factory(subject.Awaits, isolation="process"),
        isolated_factory(subject.DrawsGlobally),
    ]
    sys.path.remove(str(folder))
    del sys.modules["determinism_subject"]


def random_player(env: Any, rng: np.random.Generator) -> Any:
    return env.policies["random"](env, rng)


async def play_all(kinds: list[IsolatedFactory], order: list[int], *, concurrency: int) -> dict[int, Playthrough]:
    """Episode n plays the n-th kind, counted round, under seed n // number of kinds."""
    free = asyncio.Semaphore(concurrency)
    played: dict[int, Playthrough] = {}

    async def episode(number: int) -> None:
        seed, kind = divmod(number, len(kinds))
        async with free:
            session = await open_session(kinds[kind], env_id=str(kind), step_timeout_seconds=120)
            try:
                played[number] = await play_in(session, random_player, seed=seed, max_turns=6)
            finally:
                await session.close()

    await asyncio.gather(*map(episode, order))
    return played


def check(kinds: list[IsolatedFactory], num_episodes: int) -> None:
    numbers = list(range(num_episodes))
    alone = asyncio.run(play_all(kinds, numbers, concurrency=16))
    crowded = asyncio.run(play_all(kinds, numbers[::-1], concurrency=256))
    assert set(alone) == set(crowded) == set(numbers)
    differences = [(n, alone[n].difference_from(crowded[n])) for n in numbers if alone[n] != crowded[n]]
    assert differences == []
    # A kind plays the same in a thread and, four further on, in a process (but for SqlAnalyst, at another level there).
    for number in numbers:
        seed, kind = divmod(number, len(kinds))
        other = seed * len(kinds) + kind + 4
        if kind in (0, 1, 3) and other in crowded:
            assert alone[number] == crowded[other]
    # Another seed is another episode: the openings of what draws real numbers are all different.
    openings = [alone[n].opening[0].content for n in numbers if n % len(kinds) == len(kinds) - 1]
    assert len(set(openings)) == len(openings)


def test_a_hundred_episodes_do_not_depend_on_what_runs_beside_them(kinds: list[IsolatedFactory]) -> None:
    check(kinds, 100)


@pytest.mark.slow
def test_a_thousand_episodes_do_not_depend_on_what_runs_beside_them(kinds: list[IsolatedFactory]) -> None:
    check(kinds, 1000)
