"""A whole run in its folder.

Pinned here:
1. a run writes every file that the README names, and summary.json has the promised keys;
2. a resumed run ends with the very weights of an uninterrupted one, and no step is recorded twice;
3. a taken folder, a wrong name and a changed config are refused before anything is overwritten;
4. a run that fails leaves a summary that says so.
"""

import contextlib
import gc
import getpass
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from operator import itemgetter
from pathlib import Path

import gymnasium
import programs
import pytest
from own_signals import signal_this_process
from recorded_run import record_run
from rich.console import Console
from safetensors.torch import load_file
from small_run import small_run

from gspo_gym.base.files import take_lock, whole_lines
from gspo_gym.cli.train import main, run_training
from gspo_gym.config.build.continuation import CHANGEABLE
from gspo_gym.config.reference import leaf_keys
from gspo_gym.config.run_config import RunConfig
from gspo_gym.diagnosis.findings import diagnose
from gspo_gym.env.core import TextEnv
from gspo_gym.env.registry import register
from gspo_gym.errors import (
    CheckpointError,
    ConfigError,
    EngineMismatchError,
    GymError,
    RolloutError,
    StorageError,
    UnknownNameError,
)
from gspo_gym.policy.manifest import read_manifest
from gspo_gym.rollout.episode_files import read_episodes
from gspo_gym.rollout.ledger import Terminal, imbalances, read_ledger
from gspo_gym.run.recording import RunRecorder
from gspo_gym.run.records import read_events, read_metrics, read_run_id, read_view
from gspo_gym.types import Outcome


@pytest.fixture(autouse=True)
def a_stop_may_be_slow(monkeypatch):
    """When the time of a stop is over, the run ends its process, which is pytest's here."""
    monkeypatch.setattr("gspo_gym.base.deadline._CLOSING_SECONDS", 600.0)


def make_config(folder, *, iterations=2, **changes):
    values = small_run(
        run={"folder": str(folder), "stop_grace_seconds": 600.0},
        algorithm={"variety": "gspo_token"},
        training={"iterations_per_epoch": iterations, "checkpoint_every_n_iters": 2},
        loss={},
        evaluation={"every_n_iters": 2},
        warmup={"num_episodes": 16, "learning_rate": 1e-3},
    )
    for key, value in changes.items():
        section, name = key.split("__")
        values[section][name] = value
    return RunConfig.from_dict(values)


def weights(folder, step):
    return load_file(folder / "test" / "checkpoints" / f"step_{step:06d}" / "model.safetensors")


def test_a_run_writes_every_promised_file(tmp_path):
    summary = run_training(make_config(tmp_path))
    folder = tmp_path / "test"
    assert json.loads((folder / "summary.json").read_text()).items() >= summary.items()
    promised = {"status", "steps", "episodes", "wall_seconds", "initial_eval", "final_eval", "best_eval"}
    assert promised | {"sampled_tokens", "trained_tokens"} <= set(summary)
    for name in ("initial_eval", "final_eval", "best_eval"):
        assert {"mean_return", "success_rate", "num_episodes", "seeds"} <= set(summary[name])
        assert summary[name]["seeds"] == [0, 1, 2, 3]
    assert (summary["status"], summary["steps"], summary["episodes"]) == ("completed", 2, 16)  # 2 steps of 8 episodes
    assert [line["step"] for line in read_metrics(folder)] == [1, 2]
    told = [(line["kind"], line["step"]) for line in read_events(folder)]
    # evaluations before the first step and after the last, which is step 2, where a checkpoint is due
    assert [kind for kind, _ in told if kind != "checkpoint"] == [
        "started", "warmup", "evaluation", "evaluation", "finished",
    ]  # fmt: skip
    assert [step for kind, step in told if kind == "checkpoint"] == [0, 0, 2]  # with the warm-up, and the evaluation
    episodes = read_episodes(folder / "episodes" / "step_000002.jsonl.gz")
    assert len(episodes) == 8
    assert sum(line["rollout/sampled_tokens"] for line in read_metrics(folder)) == summary["sampled_tokens"]
    assert len(read_episodes(folder / "episodes" / "eval_000000.jsonl.gz")) == 4
    assert (folder / "ledger.jsonl").stat().st_size > 0


def living_models():
    return {id(thing) for thing in gc.get_objects() if type(thing).__name__ == "Qwen3ForCausalLM"}


def test_runs_of_one_program_leave_no_model_to_it_not_even_to_its_garbage_collector(tmp_path):
    gc.collect()
    gc.disable()  # tensors are few objects: it may not come for hours
    try:
        before = living_models()
        seen, stopped, resets = [], [], itertools.count()

        class Counting(Sums):
            def reset(self, *, seed=None, options=None):
                if next(resets) % 8 == 0:  # it looks at all objects
                    seen.append(len(living_models() - before))
                if resume == "stopped" and not stopped:  # a second signal ends the program
                    stopped.append(signal_this_process(signal.SIGTERM))
                return super().reset(seed=seed, options=options)

        register("test_run/Counting-v0", entry_point=Counting)
        for resume, iterations, ends in (
            (False, 1, contextlib.nullcontext()),
            (True, 2, contextlib.nullcontext()),
            ("stopped", 3, pytest.raises(SystemExit)),
        ):
            config = make_config(
                tmp_path, iterations=iterations, rollout__env_name="test_run/Counting-v0", rollout__env_config={}
            )
            values = config.model_dump(exclude_none=True, exclude={"warmup"})
            values["rollout"] |= {"isolation": "thread", "max_concurrent_rollouts": 1}
            with ends:
                run_training(RunConfig.from_dict(values), resume=bool(resume))
            assert living_models() == before
        assert max(seen) == 2  # the learner's, and the engine's view of it
    finally:
        gc.enable()
        gymnasium.registry.pop("test_run/Counting-v0")


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path):
    whole = record_run(make_config(tmp_path / "whole", iterations=4))
    record_run(make_config(tmp_path / "parts", iterations=2))
    resumed = run_training(make_config(tmp_path / "parts", iterations=4), resume=True)
    expected, actual = weights(tmp_path / "whole", 4), weights(tmp_path / "parts", 4)
    assert expected.keys() == actual.keys()
    assert all(expected[name].equal(actual[name]) for name in expected)  # bit for bit
    assert [line["step"] for line in read_metrics(tmp_path / "parts" / "test")] == [1, 2, 3, 4]
    for name in ("episodes", "sampled_tokens", "trained_tokens", "final_eval", "initial_eval"):
        assert resumed[name] == whole[name]


def test_a_run_goes_on_from_the_newest_sound_checkpoint_and_keeps_a_damaged_one(tmp_path):
    whole = run_training(make_config(tmp_path, iterations=4))
    folder = tmp_path / "test"
    damaged = folder / "checkpoints" / "step_000004"
    expected = {name: tensor.clone() for name, tensor in weights(tmp_path, 4).items()}  # the file is mapped
    flipped = bytearray((damaged / "model.safetensors").read_bytes())
    flipped[-1] ^= 1
    (damaged / "model.safetensors").write_bytes(flipped)
    resumed = run_training(make_config(tmp_path, iterations=4), resume=True)
    assert resumed["final_eval"] == whole["final_eval"]
    actual = weights(tmp_path, 4)
    assert all(expected[name].equal(actual[name]) for name in expected)  # steps 3 and 4 were taken again
    assert (folder / "checkpoints" / "damaged_step_000004" / "model.safetensors").read_bytes() == flipped
    (event,) = [event for event in read_events(folder) if event["kind"] == "checkpoint_damaged"]
    assert (event["step"], event["data"]["folder"], event["data"]["moved_to"]) == (
        2,
        "step_000004",
        "damaged_step_000004",
    )
    assert "step_000004/model.safetensors: is damaged: expected SHA-256" in event["data"]["reason"]
    newest = read_manifest(folder / "checkpoints" / "step_000004")
    assert newest.run == read_run_id(folder)
    config = (folder / "config.toml").read_text().partition("\n")[2]
    assert newest.origin.config == hashlib.sha256(config.encode()).hexdigest()
    assert newest.evaluation["mean_return"] == whole["final_eval"]["mean_return"]


def test_a_killed_and_resumed_run_has_the_records_of_an_undisturbed_one(tmp_path):
    """Killed by the system at any moment after step 3, while checkpoints are of steps 2, 4, ..."""
    config = make_config(tmp_path / "parts", iterations=60)
    file = tmp_path / "config.toml"
    file.write_text(config.to_toml())
    metrics = tmp_path / "parts" / "test" / "metrics.jsonl"
    with programs.Popen([sys.executable, "-m", "gspo_gym.train", str(file)], stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and not (metrics.exists() and len(metrics.read_text().splitlines()) >= 3):
            time.sleep(0.01)
        process.kill()
    num_done = len(whole_lines(metrics))
    total = num_done + 2
    run_training(make_config(tmp_path / "whole", iterations=total))
    run_training(make_config(tmp_path / "parts", iterations=total), resume=True)
    whole, parts = tmp_path / "whole" / "test", tmp_path / "parts" / "test"
    assert [line["step"] for line in read_metrics(parts)] == list(range(1, total + 1))
    assert imbalances(read_ledger(parts / "ledger.jsonl")) == []
    assert Counter(read_ledger(parts / "ledger.jsonl")) == Counter(read_ledger(whole / "ledger.jsonl"))
    of_the_resumption = ("resumed", "changed")  # it began with more iterations
    told = [(event["kind"], event["step"]) for event in read_events(parts) if event["kind"] not in of_the_resumption]
    undisturbed = [(event["kind"], event["step"]) for event in read_events(whole)]
    # a checkpoint is complete some time after its step, while the next ones are taken
    assert sorted(told, key=itemgetter(1)) == sorted(undisturbed, key=itemgetter(1))


@pytest.mark.slow
def test_a_run_keeps_its_newest_its_best_and_its_periodic_checkpoints(tmp_path):
    """Steps 0, 2, 4, 6, and 8 are evaluated."""
    keys = {
        "keep_last": 1,
        "keep_best": 1,
        "keep_best_metric": "mean_return",
        "keep_every": 4,
    }
    keys = {f"training__{key}": value for key, value in {**keys, "checkpoint_every_n_iters": 1}.items()}
    config = make_config(tmp_path, iterations=8, **keys)
    run_training(config)
    events = read_events(tmp_path / "test")
    returns = {event["step"]: event["data"]["mean_return"] for event in events if event["kind"] == "evaluation"}
    best = max(returns, key=lambda step: (returns[step], -step))
    folders = sorted(path.name for path in (tmp_path / "test" / "checkpoints").iterdir())
    assert folders == [f"step_{step:06d}" for step in sorted({best, 4, 8})]
    assert [event["step"] for event in events if event["kind"] == "checkpoint"] == [0, *range(9)]


def test_a_lora_run_resumes_from_its_adapter(tmp_path):
    # with a bonus for entropy every episode has a gradient, also where all earn the same
    lora = {"model__trainer_mode": "lora", "training__lora": {"r": 4}, "loss__kl_coef": 0.1, "loss__entropy_coef": 0.1}
    run_training(make_config(tmp_path, iterations=2, **lora))
    folder = tmp_path / "test" / "checkpoints"
    before = load_file(folder / "step_000002" / "adapter_model.safetensors")
    summary = run_training(make_config(tmp_path, iterations=4, **lora), resume=True)
    after = load_file(folder / "step_000004" / "adapter_model.safetensors")
    assert summary["steps"] == 4
    assert before.keys() == after.keys()
    assert any(not before[name].equal(after[name]) for name in before)


def test_a_taken_folder_is_refused_and_can_be_set_aside(tmp_path):
    config = make_config(tmp_path, iterations=1)
    record_run(config)
    with pytest.raises(ConfigError, match="already holds a run"):
        run_training(config)
    run_training(config, set_aside=True)
    assert (tmp_path / "test.1" / "summary.json").exists()
    assert (tmp_path / "test" / "summary.json").exists()


def test_a_resumed_run_must_be_the_same_run(tmp_path):
    record_run(make_config(tmp_path, iterations=2))
    with pytest.raises(ConfigError, match=r"training\.group_size"):
        run_training(make_config(tmp_path, iterations=4, training__group_size=2), resume=True)
    # a folder that does not say which run it is may hold another's checkpoints
    config = tmp_path / "test" / "config.toml"
    config.write_text(config.read_text().partition("\n")[2])
    (tmp_path / "test" / "events.jsonl").unlink()
    with pytest.raises(CheckpointError, match="does not say which run it holds"):
        run_training(make_config(tmp_path, iterations=4), resume=True)


def test_what_may_change_are_keys_of_the_configuration():
    assert [key for key in CHANGEABLE if key not in leaf_keys() and not key.endswith(".")] == []
    sections = {key.partition(".")[0] for key in leaf_keys()}
    assert [key for key in CHANGEABLE if key.endswith(".") and key[:-1] not in sections] == []


def test_resuming_nothing_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        run_training(make_config(tmp_path), resume=True)


def test_unknown_names_leave_no_folder_behind(tmp_path):
    for changes, match in (
        ({"rollout__env_name": "GuesNumber"}, "did you mean 'GuessNumber'"),
        ({"model__base": "tiny:qwen3-63"}, "tiny:qwen3-64"),
        ({"warmup__policy": "randm"}, "did you mean 'random'"),
        ({"model__base": "./no/such/folder"}, "not a folder"),
    ):
        with pytest.raises(UnknownNameError, match=match):
            run_training(make_config(tmp_path, **changes))
    assert not (tmp_path / "test").exists()


def test_a_run_that_cannot_start_leaves_everything_as_it_was(tmp_path):
    # no demonstration fits into 20 tokens, so the warm-up, which is after the folder is begun, fails
    with pytest.raises(RolloutError, match="context_overflow"):
        run_training(make_config(tmp_path / "runs", rollout__max_model_len=20))
    assert list(tmp_path.iterdir()) == []
    record_run(make_config(tmp_path, iterations=1))
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(RolloutError, match="context_overflow"):
        run_training(make_config(tmp_path, rollout__max_model_len=20), set_aside=True)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_a_run_that_failed_before_its_first_step_can_be_started_again(tmp_path):
    config = make_config(tmp_path)
    values = config.model_dump(exclude_none=True, exclude={"warmup"})
    values["rollout"]["max_model_len"] = 20
    with pytest.raises(RolloutError, match="context_overflow"):
        run_training(RunConfig.from_dict(values))
    assert "context_overflow" in json.loads((tmp_path / "test" / "summary.json").read_text())["error"]
    with pytest.raises(RolloutError, match="context_overflow"):  # the same again, from the checkpoint before it
        run_training(RunConfig.from_dict(values), resume=True)
    values["rollout"]["max_model_len"] = 256
    assert run_training(RunConfig.from_dict(values))["status"] == "completed"
    assert json.loads((tmp_path / "test.1" / "summary.json").read_text())["status"] == "failed"


def test_a_run_that_was_killed_before_its_first_checkpoint_is_refused_with_advice_that_works(tmp_path):
    config = make_config(tmp_path)

    def leave_what_a_kill_leaves():
        RunRecorder.create(config.run_folder, config.to_toml()).close()

    leave_what_a_kill_leaves()
    with pytest.raises(ConfigError, match=r"holds a run: it has no checkpoint to go on from, move .*--set-aside"):
        run_training(config)
    with pytest.raises(CheckpointError, match="without --resume: with --set-aside"):
        run_training(config, resume=True)
    assert run_training(config, set_aside=True)["status"] == "completed"
    assert (tmp_path / "test.1" / "config.toml").exists()


def test_resume_auto_begins_a_run_where_there_is_none_and_goes_on_where_there_is_one(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(make_config(tmp_path, iterations=1).to_toml())
    RunRecorder.create(tmp_path / "test", "left by a kill").close()
    for more in (["run.seed=0"], ["training.iterations_per_epoch=2"]):
        assert main([str(path), "--resume", "auto", *more]) == 0
    assert (tmp_path / "test.1" / "config.toml").read_text().endswith("left by a kill")
    assert [line["step"] for line in read_metrics(tmp_path / "test")] == [1, 2]
    kinds = [event["kind"] for event in read_events(tmp_path / "test")]
    assert (kinds.count("started"), kinds.count("resumed"), kinds.count("warmup")) == (1, 1, 1)
    checkpoints = tmp_path / "test" / "checkpoints"
    (checkpoints / "step_000002").rename(checkpoints / ".replaced_step_000002")  # killed while it was replaced
    shutil.rmtree(checkpoints / "step_000001")
    assert main([str(path), "--resume=auto", "training.iterations_per_epoch=2"]) == 0
    assert not (tmp_path / "test.2").exists()


def test_a_learning_rate_that_decays_keeps_its_shape_or_the_resumed_run_is_refused(tmp_path):
    decaying = make_config(tmp_path).model_dump(exclude_none=True, exclude={"warmup", "evaluation"})
    decaying |= {"optimizer": {"schedule": "linear"}, "evaluation": {"seeds": "0:1"}}
    run_training(RunConfig.from_dict(decaying))
    decaying["training"]["iterations_per_epoch"] = 4
    with pytest.raises(ConfigError, match=r"2 iterations became 4, .* the learning rate would jump") as refused:
        run_training(RunConfig.from_dict(decaying), resume=True)
    step, was, would_be = map(
        float, re.findall(r"step (\d) takes (\S+) .* would take ([0-9.e-]+)\.", str(refused.value))[0]
    )
    # two optimizer steps an iteration: a line from 1e-3 to a tenth of it over 4 steps, or over 8
    assert (was, would_be) == pytest.approx([1e-3 * (1 - 0.9 * (step - 1) / last) for last in (3, 7)], rel=1e-5)
    decaying["training"]["iterations_per_epoch"] = 2
    assert run_training(RunConfig.from_dict(decaying), resume=True)["steps"] == 2


def test_a_resumed_run_says_which_checkpoint_it_passed_over(tmp_path):
    record_run(make_config(tmp_path, iterations=4))
    newest = tmp_path / "test" / "checkpoints" / "step_000004"
    (newest / "model.safetensors").unlink()
    console = Console(file=io.StringIO(), width=200)
    run_training(make_config(tmp_path, iterations=4), resume=True, console=console)
    told = console.file.getvalue()
    moved = newest.with_name("damaged_step_000004")
    assert f"passed over a checkpoint, which is {moved} now: {newest}/model.safetensors: is missing" in told
    assert "checkpoints/step_000002 after step 2" in told


def test_a_resumed_run_says_which_of_its_records_are_gone(tmp_path):
    config = make_config(tmp_path, iterations=4)
    record_run(config)
    folder = config.run_folder
    before = read_events(folder)
    for name, kept in (("metrics.jsonl", [1, 2]), ("events.jsonl", [0])):  # lines of a disk that lost the others
        lines = (folder / name).read_text().splitlines(keepends=True)
        (folder / name).write_text("".join(lines[number] for number in kept))
    console = Console(file=io.StringIO(), width=200)
    run_training(make_config(tmp_path, iterations=5), resume=True, console=console)
    assert "metrics of 2 steps." in console.file.getvalue()
    after = read_events(folder)
    # Of the events before the checkpoint of step 4 was copied, only the first is there; their numbers stay theirs.
    saved = next(event["seq"] for event in before if event["kind"] == "checkpoint" and event["step"] == 4) - 1
    assert [event["seq"] for event in after[:4]] == [1, saved + 1, saved + 2, saved + 3]
    assert [event["kind"] for event in after[1:4]] == ["checkpoint", "resumed", "records_damaged"]
    assert after[3]["data"] == {"metrics_steps": [1, 4], "num_events": saved - 1}


class Doubled(TextEnv):
    """Is over at once; when it is first made, another process is told to begin the same run."""

    begin_another = None

    def __init__(self):
        super().__init__()
        if (begin := Doubled.begin_another) is not None:
            Doubled.begin_another = None
            begin()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "Say something.", {}

    def step(self, action):
        return "", float(len(action)), True, False, {}


def test_a_run_that_is_begun_twice_at_once_is_begun_once(tmp_path):
    config = make_config(tmp_path)
    (tmp_path / "same.toml").write_text(config.to_toml())
    refused = []

    def begin_another():
        assert not (config.run_folder / "config.toml").exists()
        command = [sys.executable, "-m", "gspo_gym.train", str(tmp_path / "same.toml"), "rollout.max_model_len=20"]
        refused.append(programs.run(command, capture_output=True, text=True))

    Doubled.begin_another = begin_another
    register("test_run/Doubled-v0", entry_point=Doubled)
    try:
        values = config.model_dump(exclude_none=True, exclude={"warmup"})
        values["rollout"] |= {"env_name": "test_run/Doubled-v0", "env_config": {}, "isolation": "thread"}
        assert run_training(RunConfig.from_dict(values))["status"] == "completed"
    finally:
        gymnasium.registry.pop("test_run/Doubled-v0")
    assert [done.returncode for done in refused] == [2]
    assert "already holds a run" in refused[0].stderr
    assert not (config.run_folder / ".lock").exists()


def test_of_two_processes_that_resume_a_run_at_once_one_goes_on(tmp_path):
    values = make_config(tmp_path, iterations=2).model_dump(exclude_none=True, exclude={"warmup"})
    values["rollout"] |= {"env_name": "test_run/Doubled-v0", "env_config": {}, "isolation": "thread"}
    refused = []

    def resume_another():
        command = [sys.executable, "-m", "gspo_gym.train", str(tmp_path / "same.toml"), "--resume"]
        refused.append(programs.run(command, capture_output=True, text=True))

    register("test_run/Doubled-v0", entry_point=Doubled)
    try:
        run_training(RunConfig.from_dict(values))
        values["training"]["iterations_per_epoch"] = 4
        config = RunConfig.from_dict(values)
        (tmp_path / "same.toml").write_text(config.to_toml().replace("test_run/Doubled-v0", "GuessNumber"))
        Doubled.begin_another = resume_another
        run_training(config, resume=True)
    finally:
        gymnasium.registry.pop("test_run/Doubled-v0")
    assert [done.returncode for done in refused] == [2]
    assert f"process {os.getpid()} on" in refused[0].stderr
    assert "(attempt 2" in refused[0].stderr
    assert [line["step"] for line in read_metrics(config.run_folder)] == [1, 2, 3, 4]
    assert [event["step"] for event in read_events(config.run_folder) if event["kind"] == "resumed"] == [2]


def test_a_folder_that_another_process_claims_meanwhile_is_left_to_it(tmp_path, monkeypatch):
    claim, claims = tmp_path / "test" / ".lock", []

    def make_folder_too_late(folder):
        folder.mkdir()
        claims.append(take_lock(claim))  # the other process's, between the look whether it is taken and the claim

    monkeypatch.setattr("gspo_gym.run.registry.make_folder", make_folder_too_late)
    with pytest.raises(ConfigError, match="another process is beginning a run there"):
        run_training(make_config(tmp_path))
    assert claim.exists()
    monkeypatch.undo()
    os.close(claims[0])  # that process is killed, and its run never began: the next start has the folder
    with pytest.raises(RolloutError, match="context_overflow"):
        run_training(make_config(tmp_path, rollout__max_model_len=20))
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_sigterm_ends_leaves_nothing(tmp_path):
    def end_this_process():
        assert (config.run_folder / ".lock").exists()
        signal_this_process(signal.SIGTERM)

    Doubled.begin_another = end_this_process
    register("test_run/Doubled-v0", entry_point=Doubled)
    values = make_config(tmp_path / "runs").model_dump(exclude_none=True, exclude={"warmup"})
    values["rollout"] |= {"env_name": "test_run/Doubled-v0", "env_config": {}, "isolation": "thread"}
    config = RunConfig.from_dict(values)
    try:
        with pytest.raises(SystemExit) as ended:
            run_training(config)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        gymnasium.registry.pop("test_run/Doubled-v0")
    assert ended.value.code == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


class Stopping(TextEnv):
    """Pays for the length of the answer; `at_number` is called when so many episodes were begun."""

    num_episodes = 0
    at_number = (0, lambda: None)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        Stopping.num_episodes += 1
        number, call = Stopping.at_number
        if Stopping.num_episodes == number:
            call()
        return "Say something.", {}

    def step(self, action):
        return "", float(len(action)), True, False, {}


@pytest.mark.parametrize(
    ("number", "name", "evaluation"),
    [
        (signal.SIGTERM, "SIGTERM", "0:40"),
        (signal.SIGINT, "SIGINT", "0:4"),
        (None, f"a request of {getpass.getuser()}", "0:40"),
        (None, f"a request of {getpass.getuser()}", "0:4"),
    ],
)
def test_a_stopped_run_is_saved_and_goes_on_to_the_weights_of_an_undisturbed_one(tmp_path, number, name, evaluation):
    def config(label):
        values = make_config(tmp_path / label, iterations=3).model_dump(exclude_none=True, exclude={"warmup"})
        values["rollout"] |= {"env_name": "test_run/Stopping-v0", "env_config": {}, "isolation": "thread"}
        values["evaluation"]["seeds"] = evaluation
        return RunConfig.from_dict(values)

    def stop():
        if number is not None:
            signal_this_process(number)
            return
        request = tmp_path / "parts" / "test" / "stop.request"
        request.touch()
        while request.exists():
            time.sleep(0.001)

    standard = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    register("test_run/Stopping-v0", entry_point=Stopping)
    try:
        run_training(config("whole"))
        Stopping.num_episodes = 0
        Stopping.at_number = (20, stop)
        with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
            run_training(config("parts"))
        assert {each: signal.getsignal(each) for each in standard} == standard
        folder = tmp_path / "parts" / "test"
        assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
        assert [line["kind"] for line in read_events(folder)][-3:] == ["checkpoint", "stopped", "finished"]
        assert read_events(folder)[-2]["data"] == {"by": name}
        run_training(config("parts"), resume=True)
    finally:
        gymnasium.registry.pop("test_run/Stopping-v0")
        Stopping.at_number = (0, lambda: None)
    assert (ended.type, ended.value.args) == ((SystemExit, (143,)) if name == "SIGTERM" else (KeyboardInterrupt, ()))
    expected, actual = weights(tmp_path / "whole", 3), weights(tmp_path / "parts", 3)
    assert all(expected[name].equal(actual[name]) for name in expected)  # bit for bit


def test_a_resumed_run_takes_the_settings_that_may_change_and_records_them(tmp_path):
    def config(iterations, **training):
        values = make_config(tmp_path, iterations=iterations).model_dump(exclude_none=True, exclude={"warmup"})
        values["rollout"] |= {"env_name": "test_run/Stopping-v0", "env_config": {}, "isolation": "thread"}
        values["training"] |= training
        return RunConfig.from_dict(values)

    console = Console(file=io.StringIO(), width=200)
    register("test_run/Stopping-v0", entry_point=Stopping)
    try:
        run_training(config(2))
        run_training(config(3, learning_rate=5e-4, keep_last=4), resume=True, console=console)
    finally:
        gymnasium.registry.pop("test_run/Stopping-v0")
    (event,) = [event for event in read_events(tmp_path / "test") if event["kind"] == "changed"]
    assert event["step"] == 2
    assert event["data"] == {
        "training.iterations_per_epoch": [2, 3],
        "training.keep_last": [2, 4],
        "training.learning_rate": [1e-3, 5e-4],
    }
    assert "training.learning_rate = 0.0005, and 0.001 when the run began" in console.file.getvalue()
    rates = [row["optim/learning_rate"] for row in read_metrics(tmp_path / "test")]
    assert rates == [1e-3, 1e-3, 5e-4]


def test_a_run_in_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file/test: cannot be written: Not a directory"):
        run_training(make_config(tmp_path / "file", model__base="tiny:qwen3-64"))


def test_a_context_longer_than_the_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="reads at most 4096 tokens, got 8192"):
        run_training(make_config(tmp_path, rollout__max_model_len=8192))


def test_a_failed_run_says_so_in_its_summary(tmp_path):
    # 20 tokens hold no prompt of this environment, so every episode of the first evaluation is dropped.
    config = make_config(tmp_path, rollout__max_model_len=20)
    with pytest.raises(RolloutError, match="context_overflow"):
        run_training(RunConfig.from_dict({**config.model_dump(exclude_none=True, exclude={"warmup"})}))
    assert json.loads((tmp_path / "test" / "summary.json").read_text())["status"] == "failed"


class Sums(TextEnv):
    """Pays for every answer what its code points add up to."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "Say something.", {}

    def step(self, action):
        return "", sum(map(ord, action)) / 1000, True, False, {}


class Fussy(TextEnv):
    """Raises at every answer with an odd sum of code points, and is over after any other."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "Say something.", {}

    def step(self, action):
        if sum(map(ord, action)) % 2:
            raise ValueError("cannot read that")
        return "", float(len(action)), True, False, {}


def test_failures_that_follow_the_policys_actions_are_counted_told_of_and_found(tmp_path):
    register("test_run/Fussy-v0", entry_point=Fussy)
    try:
        config = make_config(
            tmp_path,
            iterations=4,
            rollout__env_name="test_run/Fussy-v0",
            rollout__env_config={},
            rollout__isolation="thread",
        )
        said = io.StringIO()
        values = config.model_dump(exclude_none=True, exclude={"warmup"})
        run_training(RunConfig.from_dict(values), console=Console(file=said, width=200))
    finally:
        gymnasium.registry.pop("test_run/Fussy-v0")
    folder = tmp_path / "test"
    ends = [entry for entry in read_ledger(folder / "ledger.jsonl") if isinstance(entry, Terminal)]
    failed = sum(end.outcome is Outcome.ENV_ERROR for end in ends)
    lines = read_metrics(folder)
    assert sum(line["rollout/attempts"] for line in lines) == len(ends)
    assert sum(line["rollout/env_failed_after_action"] * line["rollout/attempts"] for line in lines) == failed > 0
    assert "selection" in [event["kind"] for event in read_events(folder)]
    assert "attempts failed in the environment after an action of the policy" in said.getvalue()
    assert "failures_follow_actions" in [finding.check for finding in diagnose(read_view(folder))]
    evaluation = next(event["data"] for event in read_events(folder) if event["kind"] == "evaluation")
    assert f"{evaluation['num_retries']} failed attempts played again" in said.getvalue()


def fussy_config(folder, iterations, env="Fussy", **changes):
    values = make_config(
        folder,
        iterations=iterations,
        training__checkpoint_every_n_iters=1,
        rollout__env_name=f"test_run/{env}-v0",
        rollout__env_config={},
        rollout__isolation="thread",
        rollout__max_concurrent_rollouts=1,
    ).model_dump(exclude_none=True, exclude={"warmup"})
    return RunConfig.from_dict(values | changes)


@pytest.fixture
def _fussy():
    register("test_run/Fussy-v0", entry_point=Fussy)
    yield
    gymnasium.registry.pop("test_run/Fussy-v0")


@pytest.mark.usefixtures("_fussy")
def test_a_resumed_run_counts_on_in_its_alarms(tmp_path):
    def alarms(name):
        events = read_events(tmp_path / name / "test")
        return [(event["step"], event["data"]) for event in events if event["kind"] == "selection"]

    run_training(fussy_config(tmp_path / "whole", 8))
    selected = alarms("whole")
    first = selected[0][0]
    assert len(selected) > 1  # at first, and when there is twice as much
    run_training(fussy_config(tmp_path / "parts", first))
    run_training(fussy_config(tmp_path / "parts", 8), resume=True)
    assert alarms("parts") == selected


@pytest.mark.usefixtures("_fussy")
def test_a_resumed_run_counts_on_the_batches_in_which_engine_and_learner_disagree(tmp_path):
    wrong = {"correction": {"max_engine_gap": 1e-12}}  # no gap is as small: the third in a row is an error
    run_training(fussy_config(tmp_path, 2, **wrong))
    with pytest.raises(EngineMismatchError, match="in 3 batches in a row"):
        run_training(fussy_config(tmp_path, 4, **wrong), resume=True)


def test_a_resumed_run_maps_no_file_of_a_checkpoint(tmp_path):
    mapped = []

    class Looking(Fussy):
        def reset(self, *, seed=None, options=None):
            lines = Path("/proc/self/maps").read_text().splitlines()
            mapped.extend(line for line in lines if str(tmp_path) in line and "checkpoints/" in line)
            return super().reset(seed=seed, options=options)

    register("test_run/Looking-v0", entry_point=Looking)
    try:
        run_training(fussy_config(tmp_path, 1, env="Looking"))
        mapped.clear()
        run_training(fussy_config(tmp_path, 2, env="Looking"), resume=True)
        assert mapped == []
    finally:
        gymnasium.registry.pop("test_run/Looking-v0")


def test_a_run_without_a_gradient_says_so_loudly(tmp_path):
    said = io.StringIO()
    values = make_config(tmp_path, training__constant_groups="keep").model_dump(exclude_none=True, exclude={"warmup"})
    values["rollout"]["max_output_tokens"] = 1  # one random byte is never a number of GuessNumber's range
    values["rollout"]["env_config"] = {"low": 100, "high": 107}
    summary = run_training(RunConfig.from_dict(values), console=Console(file=said, width=200))
    assert (summary["steps"], summary["gradient_steps"]) == (2, 0)
    assert "NOTHING WAS LEARNED: in 2 steps the optimizer took no step with a gradient" in said.getvalue()
    register("test_run/Sums-v0", entry_point=Sums)
    try:
        values["rollout"] |= {"env_name": "test_run/Sums-v0", "env_config": {}, "isolation": "thread"}
        values["run"]["folder"] = str(tmp_path / "other")
        assert run_training(RunConfig.from_dict(values))["gradient_steps"] == 2
    finally:
        gymnasium.registry.pop("test_run/Sums-v0")


@pytest.mark.slow
def test_every_command_that_a_run_names_next_works_where_it_is_printed(tmp_path):
    config = make_config(tmp_path / "runs", iterations=2, rollout__env_config={"low": 1, "high": 4, "style": "terse"})
    (tmp_path / "config.toml").write_text(config.to_toml())
    done = programs.run(
        [sys.executable, "-m", "gspo_gym.train", "config.toml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    following, _, real_model = done.stdout.partition("\nnext\n")[2].partition("\n\na real model: ")
    assert real_model.splitlines()[-1].endswith("gspo-gym train smollm2_guess")  # needs a package and minutes
    lines = [
        line.replace("gspo-gym train sql_analyst", "gspo-gym config check sql_analyst")
        for line in following.splitlines()
    ]
    assert len(lines) == 8
    assert not any("python" in line for line in lines)
    for line in lines:
        ended = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        allowed = (0, 1) if " doctor " in line else (0,)  # 1: it found something serious
        assert ended.returncode in allowed, (line, ended.stderr)


def test_every_started_episode_of_a_run_has_one_end(tmp_path):
    record_run(make_config(tmp_path, iterations=1))
    lines = [json.loads(line) for line in (tmp_path / "test" / "ledger.jsonl").read_text().splitlines()]
    started = [(line["trajectory_id"], line["attempt"]) for line in lines if "sampling_seed" in line]
    ended = [(line["trajectory_id"], line["attempt"]) for line in lines if "disposition" in line]
    assert len(started) == 8
    assert sorted(started) == sorted(ended)
    assert len(set(started)) == 8


def test_a_run_says_that_its_engine_starts(tmp_path, monkeypatch):
    """Seen by the library of the engine when it is imported, which then fails."""
    config = make_config(tmp_path)
    (tmp_path / "vllm.py").write_text(
        textwrap.dedent(f"""
        from pathlib import Path
        from gspo_gym.run.process import read_phase
        Path({str(tmp_path / "seen")!r}).write_text(read_phase(Path({str(config.run_folder)!r})).name)
        raise RuntimeError("no engine today")
    """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    values = config.model_dump(exclude_unset=True)
    values["rollout"]["engine"] = "vllm"
    with pytest.raises((GymError, RuntimeError), match="no engine today"):
        run_training(RunConfig.from_dict(values))
    assert (tmp_path / "seen").read_text() == "starting the engine"
