"""How well an environment's hand-written players do: the tables in the READMEs.

`python -m gspo_gym_envs.score FrozenLake --episodes 500 map=random` plays every policy of the environment on the seeds
0, 1, 2, ... and prints its success rate, mean return and number of turns, and how many bytes are said.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from gspo_gym.env.core import PolicyFactory
from gspo_gym.env.playing import Playthrough, play
from gspo_gym.env.registry import make
from gspo_gym.types import Message

_MAX_TURNS = 1_000
_STEP_TIMEOUT_SECONDS = 60.0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m gspo_gym_envs.score", description="Score the hand-written players."
    )
    parser.add_argument("env_id")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("kwargs", nargs="*", metavar="key=value", help="constructor arguments; values are JSON or text")
    options = parser.parse_intermixed_args(arguments)
    kwargs = dict(_key_and_value(text) for text in options.kwargs)
    print("policy     success  return  turns  first observation  later observation  action   (bytes, mean)")
    for name, policy in make(options.env_id, **kwargs).policies.items():
        print(_row(name, asyncio.run(_play_all(options.env_id, kwargs, policy, options.episodes))))


async def _play_all(env_id: str, kwargs: dict[str, Any], policy: PolicyFactory, count: int) -> list[Playthrough]:
    """One episode a seed; `kwargs` are the environment's own, so of any type."""
    settings: dict[str, Any] = {"name": env_id, "max_turns": _MAX_TURNS, "step_timeout_seconds": _STEP_TIMEOUT_SECONDS}
    return [await play(partial(make, env_id, **kwargs), policy, seed=seed, **settings) for seed in range(count)]


def _row(name: str, played: Sequence[Playthrough]) -> str:
    success = np.mean([bool(run.success) for run in played])
    mean_return = np.mean([run.episode_return or 0.0 for run in played])
    turns = np.mean([len(run.answers) for run in played])
    first = _mean_bytes([run.opening for run in played])
    later = _mean_bytes([answer.messages for run in played for answer in run.answers])
    actions = _mean_bytes([(action,) for run in played for action in run.actions])
    return f"{name:<10} {success:7.3f}  {mean_return:6.3f}  {turns:5.2f}  {first:17.1f}  {later:17.1f}  {actions:6.1f}"


def _mean_bytes(sayings: Sequence[Sequence[Message]]) -> float:
    return float(np.mean([sum(len(_text(message).encode()) for message in saying) for saying in sayings]))


def _text(message: Message) -> str:
    """The content, and the calls as the JSON that most chat templates write."""
    calls = [json.dumps({"name": call.name, "arguments": dict(call.arguments)}) for call in message.tool_calls]
    return message.content + "".join(calls)


def _key_and_value(text: str) -> tuple[str, Any]:
    """A constructor argument; its value is whatever the JSON says, or the text itself."""
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


if __name__ == "__main__":
    main()
