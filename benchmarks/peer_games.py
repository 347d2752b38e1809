"""Games that both sides of `python -m benchmarks peers` play; the standard library alone, so any environment has it."""

from __future__ import annotations

import json
import os
import random
import time
import zlib
from dataclasses import asdict, dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Job:
    """One shape of work for both sides.

    Attributes:
        game: a key of GAMES.
        num_turns: of an episode, at most.
        num_tokens: sampled a turn: exactly so many for "talk", at most for the others.
        num_episodes: of a batch, in groups of 8.
        minibatch: episodes of an optimizer step.
        num_steps: batches that are timed; one before them is not.
        text_length: of each of the environment's texts in "talk".
        goal: mean reward of a batch at which to stop; None: after num_steps.
    """

    game: str
    num_turns: int
    num_tokens: int
    num_episodes: int = 64
    minibatch: int = 64
    num_steps: int = 2
    text_length: int = 24
    goal: float | None = None
    seed: int = 0

    def to_json(self) -> str:
        """Return the job as an argument of a process."""
        return json.dumps(asdict(self))


class Game(Protocol):
    """An episode."""

    def reset(self, seed: int) -> str:
        """Begin; return the first text."""

    def step(self, said: str) -> tuple[str, float, bool]:
        """Return the next text, what the turn earned, and whether the episode is over."""


class Talk:
    """Texts of one length for a number of turns; what is earned depends on every word that was said."""

    def __init__(self, job: Job) -> None:
        self._job, self._turn = job, 0

    def reset(self, seed: int) -> str:
        self._turn = 0
        return "".join(random.Random(seed).choices("abcd", k=self._job.text_length))

    def step(self, said: str) -> tuple[str, float, bool]:
        self._turn += 1
        earned = zlib.crc32(said.encode()) / 2**32
        return "b" * self._job.text_length, earned, self._turn == self._job.num_turns


class Recall:
    """Each turn shows one of 4 letters, and the answer is the first one that was shown; the part of right answers."""

    def __init__(self, job: Job) -> None:
        self._num_turns, self._turn, self._letters = job.num_turns, 0, ""

    def reset(self, seed: int) -> str:
        self._letters = "".join(random.Random(seed).choices("abcd", k=self._num_turns + 1))
        return self._letters[0]

    def step(self, said: str) -> tuple[str, float, bool]:
        self._turn += 1
        return self._letters[self._turn], (said == self._letters[0]) / self._num_turns, self._turn == self._num_turns


GAMES = {"talk": Talk, "recall": Recall}
SYMBOLS = "12345678<>!?abcd"  # of the texts, those of "recall" among them


class Goal:
    """Ends the process, with its answer printed, as soon as a batch reaches the goal."""

    def __init__(self, job: Job) -> None:
        self._job, self._num_played = job, 0
        self._started: float | None = None
        self._rewards: list[float] = []

    def start(self) -> None:
        """Start the clock at the first episode."""
        if self._started is None:
            self._started = time.perf_counter()

    def add(self, reward: float) -> None:
        """Count one episode."""
        self._num_played += 1
        self._rewards.append(reward)
        if self._job.goal is None or len(self._rewards) < self._job.num_episodes:
            return
        mean = sum(self._rewards) / len(self._rewards)
        self._rewards.clear()
        if mean >= self._job.goal and self._started is not None:
            report({"seconds": time.perf_counter() - self._started, "episodes": self._num_played})
            os._exit(0)  # neither side has a hook that ends a run here without more work


def report(answer: dict[str, Any]) -> None:
    """Print a side's answer as the last line of its output (Any: JSON)."""
    print(json.dumps(answer), flush=True)
