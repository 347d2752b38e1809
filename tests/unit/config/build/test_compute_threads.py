"""Every command that samples here has one thread that computes with several, and all others compute with one.

So does every command that computes without an engine; `verify` with several if that is faster, as a run does.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo_gym.cli.evaluate import run_evaluation
from gspo_gym.cli.main import main
from gspo_gym.cli.models_serve import add_arguments, running_engine
from gspo_gym.cli.train import run_training
from gspo_gym.config.build import preflight
from gspo_gym.config.build.episode_collection import CollectSettings, collect_episodes
from gspo_gym.config.build.processes import build_replica
from gspo_gym.config.build.threads import faster, use_threads
from gspo_gym.config.build.token_audit import audit_tokens
from gspo_gym.config.run_config import RunConfig, load_config
from gspo_gym.diagnosis import oracle
from gspo_gym.diagnosis import tokens as checks
from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.local.batch import Batch
from gspo_gym.env.core import Info, TextEnv
from gspo_gym.policy import export
from gspo_gym.remote.apps import check
from gspo_gym.run.models import Model
from gspo_gym.run.records import read_events

TINY = "tiny:qwen3-64"
WANTED = 3
ENVIRONMENT = f"{__name__}:LookingEnv"
seen: dict[str, set[int]] = {}  # torch's numbers of threads, by the place where they were looked at


def look(place: str) -> None:
    seen.setdefault(place, set()).add(torch.get_num_threads())


class LookingEnv(TextEnv):
    """One turn, in a thread of this process."""

    isolation = "thread"

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, Info]:
        super().reset(seed=seed, options=options)
        look("environment")
        return "?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        look("environment")
        return "!", float(len(action)), True, False, {}


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Look in the engine's steps and in the threads of `asyncio.to_thread`, too; begin with WANTED threads."""
    seen.clear()
    step, to_thread = Batch.step, asyncio.to_thread

    def looking_step(batch: Batch) -> Any:
        look(threading.current_thread().name)
        return step(batch)

    async def looking_to_thread(work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        def looked() -> Any:
            look("asyncio.to_thread")
            return work(*arguments, **options)

        return await to_thread(looked)

    monkeypatch.setattr(Batch, "step", looking_step)
    monkeypatch.setattr(asyncio, "to_thread", looking_to_thread)
    monkeypatch.setenv("OMP_NUM_THREADS", str(WANTED))  # no probe of which number is faster
    before = torch.get_num_threads()
    torch.set_num_threads(WANTED)
    yield
    torch.set_num_threads(before)


def make_config(folder: Path, **changes: dict[str, Any]) -> RunConfig:
    sections: dict[str, dict[str, Any]] = {
        "run": {"folder": str(folder)},
        "algorithm": {"variety": "gspo"},
        "model": {"base": TINY, "label": "threads"},
        "rollout": {
            "env_name": ENVIRONMENT,
            "max_turns": 1,
            "max_output_tokens": 2,
            "max_model_len": 64,
            "episodes_per_batch": 16,
        },
        "training": {
            "iterations_per_epoch": 1,
            "group_size": 8,
            "batch_size": 16,
            "learning_rate": 1e-4,
            "checkpoint_every_n_iters": 1,
        },
        "evaluation": {"seeds": [0, 1], "every_n_iters": 1},
    }
    for name, keys in changes.items():
        sections[name] |= keys
    path = folder / "config.json"
    path.write_text(json.dumps(sections), encoding="utf-8")
    return load_config(path)


def train(folder: Path) -> None:
    run_training(make_config(folder))


def evaluate(folder: Path) -> None:
    run_evaluation(make_config(folder), TINY)


def collect(_: Path) -> None:
    collect_episodes(ENVIRONMENT, TINY, seeds=[0, 1], settings=CollectSettings(max_output_tokens=2, max_model_len=64))


def serve(_: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)

    async def main() -> None:
        async with running_engine(Model(TINY), parser.parse_args([])) as (engine, _tokenizer):
            await engine.generate([72, 105], SamplingParams(max_tokens=2, stop_token_ids=(), seed=0))
            await asyncio.to_thread(look, "environment")  # as what a server starts later

    asyncio.run(main())


def audit(_: Path) -> None:
    audit_tokens(ENVIRONMENT, TINY, num_turns=1)


@pytest.mark.parametrize("command", [train, evaluate, collect, serve, audit])
def test_only_the_engines_thread_computes_with_several(command: Callable[[Path], None], tmp_path: Path) -> None:
    """Else a second pool of workers keeps both from spinning: sampling with two threads then took twice its time."""
    command(tmp_path)
    assert seen.pop("gspo-gym-engine") == {WANTED}
    assert seen.pop("environment") == {1}
    assert seen in ({}, {"asyncio.to_thread": {1}})
    assert torch.get_num_threads() == WANTED


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with an adapter, which recorded its tokens."""
    folder = tmp_path_factory.mktemp("recorded")
    lora = {"model": {"trainer_mode": "lora"}, "training": {"keep_last": 9}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # it records no numbers of its own
        run_training(make_config(folder, run={"log_tokens_every_n_iters": 1}, **lora))
    return folder / "threads"


# Where each command computes, and its arguments; RUN and OUT are folders, FILE is a configuration.
COMPUTING: dict[str, tuple[Any, str, list[str]]] = {
    "verify": (oracle.Model, "forward", ["verify", "RUN", "--step", "1"]),
    "report": (checks, "policy_loss", ["report", "RUN"]),
    "models export": (export, "load_policy", ["models", "export", TINY, "--out", "OUT"]),
    "models merge": (export, "write_full", ["models", "merge", "RUN", "--out", "OUT"]),
    "app check": (check, "check_app", ["app", "check", "http://127.0.0.1:9", "--env", "quiz"]),
    "config check": (preflight, "build_warmup", ["config", "check", "--deep", "FILE"]),
}


@pytest.mark.parametrize("name", COMPUTING)
def test_a_command_without_an_engine_computes_with_one_thread(
    name: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of which a pass takes the longer, the more threads it has, so that `verify` takes one."""
    owner, function, arguments = COMPUTING[name]
    computes, now = getattr(owner, function), 0.0

    def looking(*given: Any, **options: Any) -> Any:
        look(name)
        return computes(*given, **options)

    def clock() -> float:
        nonlocal now
        now += 0.1 * torch.get_num_threads()
        return now

    monkeypatch.setattr(owner, function, looking)
    monkeypatch.setitem(inspect.unwrap(faster).__kwdefaults__, "clock", clock)
    monkeypatch.delenv("OMP_NUM_THREADS")
    make_config(tmp_path)
    names = {"RUN": str(run), "OUT": str(tmp_path / "out"), "FILE": str(tmp_path / "config.json")}
    main([names.get(argument, argument) for argument in arguments])
    assert seen[name] == {1}
    assert torch.get_num_threads() == WANTED


@pytest.mark.parametrize(("recorded", "is_given", "number"), [(2, False, 2), (9, False, WANTED), (2, True, WANTED)])
def test_verify_has_the_learners_number_unless_the_environment_gives_one(
    recorded: int, is_given: bool, number: int, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, forward = tmp_path / "run", oracle.Model.forward
    shutil.copytree(run, folder)
    with (folder / "events.jsonl").open("a", encoding="utf-8") as file:
        event = {"kind": "threads", "data": {"sampling": 1, "learning": recorded}}
        file.write(json.dumps(read_events(folder)[-1] | event) + "\n")
    if not is_given:
        monkeypatch.delenv("OMP_NUM_THREADS")

    def looking(*given: Any, **options: Any) -> Any:
        look("verify")
        return forward(*given, **options)

    monkeypatch.setattr(oracle.Model, "forward", looking)
    assert main(["verify", str(folder), "--step", "1"]) == 0
    assert seen["verify"] == {number}


@pytest.mark.parametrize(("num_replicas", "share"), [(1, 3), (2, 1), (5, 1)])
def test_a_process_that_samples_for_others_gives_its_share_to_its_engine(
    num_replicas: int, share: int, tmp_path: Path
) -> None:
    order = {
        "config": make_config(tmp_path).model_dump(mode="json", exclude_none=True),
        "num_replicas": num_replicas,
        "base": TINY,
        "number": 0,
    }

    async def main() -> None:
        engine = await build_replica(order, {})
        await engine.generate([72, 105], SamplingParams(max_tokens=2, stop_token_ids=(), seed=0))
        await engine.close()

    asyncio.run(main())
    assert seen.pop("gspo-gym-engine") == {share}
    assert seen in ({}, {"asyncio.to_thread": {1}})
    assert torch.get_num_threads() == 1


def test_the_number_holds_for_this_thread_and_later_ones_have_one() -> None:
    found: list[int] = []

    def begin() -> None:
        use_threads(WANTED)
        later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        later.start()
        later.join()
        found.append(torch.get_num_threads())

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert found == [1, WANTED]
