"""Checkpoints: exact, verified, and never half there, whenever the process dies."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from torch import Tensor

from gspo_gym.errors import CheckpointError
from gspo_gym.learning.saved import copy_state
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.checkpoints import CheckpointStore
from gspo_gym.policy.load import Policy, load_policy
from gspo_gym.policy.lora import add_lora
from gspo_gym.policy.manifest import Origin, RetentionSettings, git_revision, read_manifest, verify
from gspo_gym.run.models import find_model
from gspo_gym.run.recording import RunRecorder
from gspo_gym.run.records import read_run_id


@dataclass
class FakeLearner:
    """Tensors and counters that the test chooses."""

    held: dict[str, Tensor] = field(default_factory=lambda: {"optimizer.exp_avg.w": torch.arange(6.0).reshape(2, 3)})

    def copy_state(self) -> Callable[[Path], None]:
        return copy_state(self.held)

    def counters(self) -> Mapping[str, int | float]:
        return {"learner.num_updates": 3, "rate": 1 / 3}


def copy_fake_policy(policy: Policy) -> Callable[[Path], None]:
    """A policy of two files, one of them in a folder; its `base` is its content."""

    def write(folder: Path) -> None:
        (folder / "base").mkdir(parents=True)
        (folder / "model.safetensors").write_text(policy.base * 100, encoding="utf-8")
        (folder / "base" / "config.json").write_text("{}", encoding="utf-8")

    return write


POLICY = Policy(model=None, tokenizer=None, base="weights")
STATE = {"step": 20, "best_eval": {"mean_return": 0.1 + 0.2}, "curve": [[0, 1 / 3]]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def store(folder: Path) -> CheckpointStore:
    return CheckpointStore(folder, copy_policy=copy_fake_policy)


def save(store: CheckpointStore, step: int, state: Mapping[str, Any] = STATE) -> Path:
    return store.save(step, policy=POLICY, learner=FakeLearner(), trainer_state=state)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_comes_back_bit_for_bit(folder: Path) -> None:
    held = {
        "optimizer.exp_avg.w": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
        "optimizer.step.w": torch.tensor(7.0),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "half": torch.tensor([1 / 3], dtype=torch.bfloat16),
    }
    store = CheckpointStore(folder, copy_policy=copy_fake_policy)
    assert store.save(20, policy=POLICY, learner=FakeLearner(held), trainer_state=STATE) == folder / "step_000020"
    loaded = store.load(20)
    assert (loaded.step, loaded.folder, loaded.model_folder) == (20, folder / "step_000020", folder / "step_000020")
    assert loaded.trainer_state == STATE
    assert loaded.learner_counters == {"learner.num_updates": 3, "rate": 1 / 3}
    assert set(loaded.learner_tensors) == set(held)
    for name, tensor in held.items():
        assert loaded.learner_tensors[name].dtype == tensor.dtype
        assert torch.equal(loaded.learner_tensors[name], tensor)
    assert (loaded.model_folder / "model.safetensors").read_text(encoding="utf-8") == "weights" * 100


def test_a_learner_without_state_yet_can_be_saved(store: CheckpointStore) -> None:
    store.save(0, policy=POLICY, learner=FakeLearner({}), trainer_state={})
    assert store.load_latest().learner_tensors == {}


@pytest.mark.parametrize("is_lora", [False, True])
def test_the_policy_in_a_checkpoint_is_one_that_load_policy_reads(folder: Path, is_lora: bool) -> None:
    policy = load_policy("tiny:qwen3-64", seed=5)
    if is_lora:
        policy = Policy(add_lora(policy.model, LoraSettings(), seed=1), policy.tokenizer, policy.base)
    store = CheckpointStore(folder)
    store.save(1, policy=policy, learner=FakeLearner(), trainer_state={})
    again = load_policy(str(store.load_latest().model_folder))
    before, after = policy.model.state_dict(), again.model.state_dict()
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_newest_is_found_by_number_and_the_oldest_go(store: CheckpointStore, folder: Path) -> None:
    for step in (5, 999_999, 1_000_000, 1_000_001):
        save(store, step, {"step": step})
    assert store.steps() == (1_000_000, 1_000_001)
    assert store.load_latest().trainer_state == {"step": 1_000_001}
    assert names(folder) == ["step_1000000", "step_1000001"]
    keep_one = CheckpointStore(folder, retention=RetentionSettings(keep_last=1), copy_policy=copy_fake_policy)
    save(keep_one, 1_000_002)
    assert keep_one.steps() == (1_000_002,)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, (3, 7, 8)),  # the last two and the best: of 3 and 5, equally good, the earlier
        ({"keep_best": 0}, (7, 8)),
        ({"keep_best": 3, "keep_last": 1}, (3, 4, 5, 8)),
        ({"keep_best_metric": "mean_return"}, (6, 7, 8)),
        ({"keep_best_metric": "mean_env_return"}, (7, 8)),  # no evaluation has one
        ({"keep_best": 0, "keep_last": 1, "keep_every": 3}, (3, 6, 8)),
    ],
)
def test_the_newest_the_best_and_the_periodic_ones_stay(
    folder: Path, settings: dict[str, Any], kept: tuple[int, ...]
) -> None:
    """The success rate is decided by the second evaluation, so the first, with none, is the worst; step 2 has none."""
    rates = {1: None, 3: 0.5, 4: 0.25, 5: 0.5, 6: 0.125}
    store = CheckpointStore(folder, retention=RetentionSettings(**settings), copy_policy=copy_fake_policy)
    for step in range(9):
        numbers = None
        if step in rates:
            name = "mean_return" if rates[step] is None else "success_rate"
            numbers = {"score": name, "success_rate": rates[step], "mean_return": step / 10}
        store.write(store.copy(step, policy=POLICY, learner=FakeLearner(), trainer_state=STATE, evaluation=numbers))
    assert store.steps() == kept
    assert CheckpointStore(folder, retention=RetentionSettings(**settings)).best() == (
        folder / f"step_{3:06d}" if settings == {} else store.best()
    )


def test_a_copy_does_not_change_with_what_it_was_taken_of(folder: Path) -> None:
    """AdamW and the optimizer step change tensors in place, also while the copy is written."""
    policy = load_policy("tiny:qwen3-64", seed=5)
    adapted = Policy(
        add_lora(load_policy("tiny:qwen3-64", seed=5).model, LoraSettings(), seed=1), policy.tokenizer, policy.base
    )
    for number, each in enumerate((policy, adapted)):
        store, learner = CheckpointStore(folder / str(number)), FakeLearner()
        held = {name: tensor.clone() for name, tensor in each.model.state_dict().items()}
        draft = store.copy(1, policy=each, learner=learner, trainer_state={})
        with torch.no_grad():
            for tensor in (*learner.held.values(), *(p for p in each.model.parameters() if p.requires_grad)):
                tensor.add_(1.0)
        store.write(draft)
        found = store.load(1)
        assert torch.equal(found.learner_tensors["optimizer.exp_avg.w"], torch.arange(6.0).reshape(2, 3))
        again = load_policy(str(found.model_folder)).model.state_dict()
        assert all(torch.equal(again[name], tensor) for name, tensor in held.items())
        assert not torch.equal(
            next(p for p in each.model.parameters() if p.requires_grad),
            held[next(n for n, p in each.model.named_parameters() if p.requires_grad)],
        )


def test_saving_a_step_again_replaces_it(store: CheckpointStore, folder: Path) -> None:
    save(store, 5, {"try": 1})
    save(store, 5, {"try": 2})
    assert store.load(5).trainer_state == {"try": 2}
    assert names(folder) == ["step_000005"]


def test_the_manifest_lists_every_file_but_itself(store: CheckpointStore) -> None:
    folder = save(store, 5)
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    written = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    assert set(manifest["files"]) == set(written) - {"manifest.json"}
    assert {name: entry["bytes"] for name, entry in manifest["files"].items()} == {
        name: len(path.read_bytes()) for name, path in written.items() if name != "manifest.json"
    }
    assert (manifest["schema"], manifest["step"]) == (2, 5)


# --- what is damaged or missing ---------------------------------------------------------------------------------------

FILES = ["model.safetensors", "base/config.json", "resume/learner.safetensors", "resume/state.json"]


def flip_one_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_last_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_one_bit, "is damaged: expected SHA-256"),
        (cut_last_byte, r"expected \d+ bytes, got"),
        (Path.unlink, "is missing"),
    ],
)
def test_a_damaged_file_is_named(store: CheckpointStore, name: str, damage: Any, message: str) -> None:
    folder = save(store, 5)
    damage(folder / name)
    with pytest.raises(CheckpointError, match=rf"step_000005/{name}: {message}"):
        store.load(5)


def written(values: Any) -> str:
    return json.dumps(values, indent=2) + "\n"


def outside(name: str) -> str:
    return written({"schema": 1, "step": 5, "files": {name: {"bytes": 1, "sha256": ""}}})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is damaged: JSONDecodeError"),
        (written([]), "is damaged: TypeError"),
        ("[" * 100_000, "is damaged: RecursionError"),
        ('{"schema": 1, "files": {}}\n', "is damaged: ValueError: it is not as it was written"),
        ('{\n  "step": 5,\n  "step": 5\n}\n', "is damaged: ValueError: it is not as it was written"),
        ('{\n  "step": Infinity\n}\n', "is damaged: ValueError: Infinity is no number"),
        (written({"schema": 1, "files": []}), "is damaged: AttributeError"),
        (written({"schema": 3, "files": {}}), "expected schema 1 or 2, got 3"),
        (written({"schema": 2, "step": 5, "files": {}}), "is damaged: KeyError: 'digest'"),
        (
            written({"schema": 2, "step": 5, "files": {}, "digest": "0" * 64}),
            "is damaged: .* its contents were changed",
        ),
        (written({"schema": 1, "step": 5, "files": {}})[:-1], "is damaged: .* its last line is cut"),
        (written({"schema": 1, "files": {"a": {}}}), "is damaged: KeyError: 'bytes'"),
        (written({"schema": 1, "files": {}}), "is damaged: KeyError: 'step'"),
        (written({"schema": 1, "step": True, "files": {}}), "is damaged: .* step: expected an integer >= 0, got True"),
        (outside("../step_000004/a"), "lists '../step_000004/a', which is not a file of the checkpoint's folder"),
        (outside("/etc/passwd"), "lists '/etc/passwd', which is not"),
        (outside("base/./a"), "lists 'base/./a', which is not"),
        (outside("a\0b"), r"lists 'a\\x00b', which is not"),
    ],
)
def test_a_damaged_manifest_is_named(store: CheckpointStore, content: str, message: str) -> None:
    folder = save(store, 5)
    (folder / "manifest.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=rf"manifest\.json: {message}"):
        verify(folder)


def test_a_manifest_of_an_earlier_version_is_read(store: CheckpointStore) -> None:
    path = save(store, 5) / "manifest.json"
    files = json.loads(path.read_text())["files"]
    path.write_text(written({"schema": 1, "step": 5, "run": "r1", "files": files}))
    assert (store.load(5).step, read_manifest(path.parent).run, read_manifest(path.parent).evaluation) == (
        5,
        "r1",
        None,
    )


def test_a_checkpoint_says_where_it_comes_from(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    git = ["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "init", "-q", str(checkout)], check=True)
    (checkout / "file").write_text("1")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    revision = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert git_revision(checkout) == revision
    (checkout / "file").write_text("2")
    assert git_revision(checkout) == f"{revision}-dirty"
    (checkout / "inside").mkdir()
    assert git_revision(checkout / "inside") is None
    parent = {"run": "elsewhere", "step": 7}
    origin = Origin.of_this_process("[run]\n", parent=parent)
    store = CheckpointStore(tmp_path / "run", run_id="here", origin=origin, copy_policy=copy_fake_policy)
    found = read_manifest(save(store, 5)).origin
    assert found == store.load(5).origin == dataclasses.replace(origin, run="here")
    assert (found.run, found.parent) == ("here", parent)
    assert found.config == hashlib.sha256(b"[run]\n").hexdigest()
    assert {"python", "torch", "transformers", "gspo-gym"} <= set(found.packages)
    assert found.packages["torch"] == torch.__version__.split("+")[0] or found.packages["torch"] == torch.__version__


def test_a_file_that_is_not_listed_is_refused_by_name(store: CheckpointStore) -> None:
    folder = save(store, 5)
    (folder / "base" / "adapter_config.json").write_text("{}")  # what is there decides how a model is loaded
    with pytest.raises(CheckpointError, match=r"base/adapter_config\.json: does not belong to the checkpoint"):
        store.load(5)


def test_a_link_is_refused_by_name(store: CheckpointStore, tmp_path: Path) -> None:
    folder = save(store, 5)
    (folder / "model.safetensors").rename(tmp_path / "elsewhere")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is a link"):
        store.load(5)


@pytest.mark.parametrize("name", ["resume/state.json", "resume/learner.safetensors"])
def test_a_manifest_that_does_not_list_what_a_restart_needs_is_refused(store: CheckpointStore, name: str) -> None:
    path = save(store, 5) / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["files"][name]
    del manifest["digest"]
    path.write_text(written({**manifest, "schema": 1}))
    with pytest.raises(CheckpointError, match=rf"manifest\.json: does not list {name}"):
        store.load(5)


def test_a_renamed_checkpoint_is_refused_by_the_step_that_it_was_saved_after(
    store: CheckpointStore, folder: Path
) -> None:
    save(store, 5).rename(folder / "step_000009")
    with pytest.raises(CheckpointError, match=r"step_000009: was saved after step 5"):
        store.load_latest()


def test_a_checkpoint_of_another_run_is_refused_by_the_name_of_its_run(tmp_path: Path) -> None:
    first, second = (
        CheckpointStore(tmp_path / name, run_id=name, copy_policy=copy_fake_policy) for name in ("first", "second")
    )
    save(second, 4)
    shutil.copytree(save(first, 5), tmp_path / "second" / "step_000005")
    assert first.load_latest().step == 5
    with pytest.raises(CheckpointError, match=r"step_000005: is a checkpoint of another run \(first; this one is sec"):
        second.load(5)
    found = second.load_latest()
    assert (found.step, list(found.damaged)) == (4, [tmp_path / "second" / "step_000005"])
    # one that names no run is not known to be of this one
    save(CheckpointStore(tmp_path / "second", copy_policy=copy_fake_policy), 6)
    with pytest.raises(CheckpointError, match="another run"):
        second.load(6)


def test_a_checkpoint_of_another_run_is_refused_where_nothing_is_left_of_a_run_but_its_config(tmp_path: Path) -> None:
    first, second = (RunRecorder.create(tmp_path / name, "").folder for name in ("first", "second"))
    for folder, step in ((first, 5), (second, 4)):
        store = CheckpointStore(folder / "checkpoints", run_id=read_run_id(folder), copy_policy=copy_fake_policy)
        save(store, step)
        (folder / "events.jsonl").unlink()
    shutil.copytree(first / "checkpoints" / "step_000005", second / "checkpoints" / "step_000005")
    found = CheckpointStore(second / "checkpoints", run_id=read_run_id(second)).load_latest()
    assert found.step == 4
    (reason,) = found.damaged.values()
    assert "step_000005: is a checkpoint of another run" in reason


def test_what_is_evaluated_is_the_runs_own_checkpoint_of_the_step_that_its_name_says(tmp_path: Path) -> None:
    for name in ("first", "second"):
        RunRecorder.create(tmp_path / name, "").close()
    first, second = (tmp_path / name / "checkpoints" for name in ("first", "second"))
    for step, folder in ((4, first), (6, second)):
        CheckpointStore(folder, run_id=read_run_id(folder.parent)).save(
            step, policy=load_policy("tiny:qwen3-64"), learner=FakeLearner(), trainer_state={}
        )
    assert find_model(str(first.parent)).base == str(first / "step_000004")
    shutil.copytree(second / "step_000006", first / "step_000006")
    with pytest.raises(CheckpointError, match="step_000006: is a checkpoint of another run"):
        find_model(str(first.parent))
    (second / "step_000006").rename(second / "step_000009")
    with pytest.raises(CheckpointError, match="step_000009: was saved after step 6"):
        find_model(str(second.parent))
    with pytest.raises(CheckpointError, match="step_000009: was saved after step 6"):
        load_policy(str(second / "step_000009"))
    shutil.copytree(second / "step_000009", tmp_path / "my_model")
    load_policy(str(tmp_path / "my_model"))  # a name that says no step


def test_a_model_is_not_loaded_from_a_damaged_checkpoint_of_a_run(folder: Path) -> None:
    store = CheckpointStore(folder)
    saved = store.save(1, policy=load_policy("tiny:qwen3-64"), learner=FakeLearner(), trainer_state={})
    flip_one_bit(saved / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is damaged"):
        load_policy(str(saved))
    shutil.rmtree(saved / "resume")  # a plain model's folder, then
    load_policy(str(saved))


def test_what_is_incomplete_is_not_the_latest(store: CheckpointStore, folder: Path) -> None:
    save(store, 5)
    for step, missing in ((6, "manifest.json"), (7, "model.safetensors")):
        incomplete = folder / f"step_{step:06d}"
        shutil.copytree(folder / "step_000005", incomplete)
        (incomplete / missing).unlink()
    shutil.copytree(folder / "step_000005", folder / "step_000008")
    cut_last_byte(folder / "step_000008" / "resume" / "learner.safetensors")
    shutil.copytree(folder / "step_000005", folder / "step_9_copy")
    (folder / "step_000010").write_text("not a folder", encoding="utf-8")
    assert store.steps() == (5,)
    assert store.load_latest().step == 5
    with pytest.raises(
        CheckpointError, match=r"step_000006/manifest\.json: is missing; the checkpoint is not complete"
    ):
        store.load(6)


# --- 7 ways to be damaged, at 30 places each --------------------------------------------------------------------------


CHANGES: dict[str, Callable[[bytes, int], bytes]] = {
    "a bit is flipped": lambda b, n: b[:n] + bytes([b[n] ^ 1 << n % 8]) + b[n + 1 :],
    "it is truncated": lambda b, n: b[:n],
    "it is extended": lambda b, n: b + (b"\n" if n % 2 else b"\0" * (n + 1)),
    "a block is inverted": lambda b, n: b[:n] + bytes(255 - byte for byte in b[n : n + 512]) + b[n + 512 :],
}


@pytest.fixture(scope="module")
def three_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a run (steps 4 and 5), of another run, and of one of another model."""
    root = tmp_path_factory.mktemp("runs")
    for run, base in (("run", "weights"), ("other", "weights"), ("model", "strange")):
        store = CheckpointStore(root / run, run_id=run, copy_policy=copy_fake_policy)
        for step in (4, 5):
            store.save(
                step, policy=Policy(None, None, base), learner=FakeLearner(), trainer_state={"step": step, "of": run}
            )
    return root


@pytest.mark.parametrize("way", ["it is missing", *CHANGES, "it is another run's", "it is another model's"])
def test_damage_of_any_kind_at_any_place_is_found_and_the_checkpoint_before_is_used(
    three_runs: Path, tmp_path: Path, way: str
) -> None:
    """Every file in turn, the manifest too, at 30 offsets drawn over its bytes: 7 x 30 = 210 checkpoints."""
    chance, names_of_files = random.Random(way), [*FILES, "manifest.json"]
    for case in range(30):
        folder = tmp_path / str(case)
        shutil.copytree(three_runs / "run", folder)
        damaged = folder / "step_000005"
        name = names_of_files[case % len(names_of_files)]
        path = damaged / name
        if way == "it is missing":
            path.unlink()
        elif way in CHANGES:
            content = path.read_bytes()
            path.write_bytes(CHANGES[way](content, chance.randrange(len(content))))
        else:
            # the files of another checkpoint, a few or all, but for those that are the same in both
            strange = three_runs / ("other" if way == "it is another run's" else "model") / "step_000005"
            for each in chance.sample(FILES, k=chance.randrange(5)):
                shutil.copyfile(strange / each, damaged / each)
            shutil.copyfile(strange / "manifest.json", damaged / "manifest.json")
        store = CheckpointStore(folder, run_id="run", copy_policy=copy_fake_policy)
        found = store.load_latest()
        assert (found.step, found.trainer_state) == (4, {"step": 4, "of": "run"}), (way, case, name)
        assert list(found.damaged) == [damaged]
        assert str(damaged) in found.damaged[damaged]
        assert store.set_aside(damaged) == folder / "damaged_step_000005"
        save(store, 5, {"step": 5})
        assert store.load_latest().step == 5
        assert names(folder) == ["damaged_step_000005", "step_000004", "step_000005"]


def test_the_error_of_a_run_without_a_sound_checkpoint_names_what_is_wrong_with_each(store: CheckpointStore) -> None:
    flip_one_bit(save(store, 5) / "model.safetensors")
    (save(store, 6) / "resume" / "state.json").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"no checkpoint is sound: .*step_000006/resume/state\.json: is miss.*5/model\.safetensors",
    ):
        store.load_latest()


def test_damaged_checkpoints_of_one_step_are_all_kept(store: CheckpointStore, folder: Path) -> None:
    assert [store.set_aside(save(store, 5)).name for _ in range(3)] == [
        "damaged_step_000005",
        "damaged_step_000005.1",
        "damaged_step_000005.2",
    ]


def test_where_there_is_no_checkpoint_the_error_says_where_it_looked(store: CheckpointStore, folder: Path) -> None:
    assert store.steps() == ()
    with pytest.raises(CheckpointError, match=rf"{folder}: there is no complete checkpoint"):
        store.load_latest()
    save(store, 5)
    with pytest.raises(CheckpointError, match=r"step_000004: there is no such checkpoint; complete ones: \[5\]"):
        store.load(4)


# --- crashes ----------------------------------------------------------------------------------------------------------


def test_a_save_that_fails_leaves_the_earlier_checkpoint_and_nothing_else(store: CheckpointStore, folder: Path) -> None:
    """On a full disk: see test_full_disk.py."""
    save(store, 5)
    with pytest.raises(CheckpointError, match=r"step_000006: could not be saved: .*not JSON"):
        save(store, 6, {"x": float("nan")})
    assert store.load_latest().step == 5
    assert names(folder) == ["step_000005"]


def test_what_a_save_that_was_stopped_leaves_is_removed_by_the_next(store: CheckpointStore, folder: Path) -> None:
    save(store, 5)

    def stop_half_way(policy: Policy) -> Callable[[Path], None]:
        def write(target: Path) -> None:
            copy_fake_policy(policy)(target)
            raise KeyboardInterrupt

        return write

    with pytest.raises(KeyboardInterrupt):
        save(CheckpointStore(folder, copy_policy=stop_half_way), 6)
    assert names(folder) == [".tmp_step_000006", "step_000005"]
    assert store.load_latest().step == 5
    save(store, 7)
    assert names(folder) == ["step_000005", "step_000007"]


def test_a_replacement_that_stops_before_its_last_rename_leaves_the_old_one(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 5, {"try": 1})
    rename = Path.rename

    def stop_at_the_draft(path: Path, target: Path) -> Path:
        if path.name.startswith(".tmp_"):
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", stop_at_the_draft)
        with pytest.raises(KeyboardInterrupt):
            save(store, 5, {"try": 2})
    assert store.load_latest().trainer_state == {"try": 1}


@pytest.mark.parametrize("is_new_one_there", [False, True])
def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(
    store: CheckpointStore, folder: Path, is_new_one_there: bool
) -> None:
    save(store, 5, {"try": 1})
    (folder / "step_000005").rename(folder / ".replaced_step_000005")
    if is_new_one_there:
        shutil.copytree(folder / ".replaced_step_000005", folder / "step_000005")
    assert store.load_latest().trainer_state == {"try": 1}
    assert names(folder) == ["step_000005"]


# Forks after the imports, so that a kill costs no start-up. Every byte of a checkpoint follows from its step.
WRITER = textwrap.dedent("""
    import os, random, signal, sys, time
    from pathlib import Path
    import torch
    from gspo_gym.learning.saved import copy_state
    from gspo_gym.policy.checkpoints import CheckpointStore
    from gspo_gym.errors import CheckpointError

    torch.set_num_threads(1)
    folder, num_kills = Path(sys.argv[1]), int(sys.argv[2])

    def copy_policy(step):
        def write(target):
            target.mkdir(parents=True)
            for number in range(4):
                (target / f"part_{number}.txt").write_bytes(bytes([step % 251]) * 200_000)
        return write

    class Learner:
        def __init__(self, step):
            self.step = step
        def copy_state(self):
            return copy_state({"w": torch.full((50_000,), float(self.step))})
        def counters(self):
            return {"step": self.step}

    def write_for_ever(step):
        store = CheckpointStore(folder, copy_policy=copy_policy)
        while True:
            # each step twice, so that replacing one is interrupted, too
            store.save(step // 2, policy=step // 2, learner=Learner(step // 2), trainer_state={"step": step // 2})
            step += 1

    chance, patience = random.Random(0), 0.12
    last = -1
    for kill in range(num_kills):
        child = os.fork()
        if child == 0:
            write_for_ever(2 * (last + 1))
        time.sleep(chance.uniform(0.0, patience))
        patience *= 2  # until a checkpoint comes through, however busy the machine is
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        store = CheckpointStore(folder)
        try:
            found = store.load_latest()
        except CheckpointError as error:
            assert last == -1 and "no complete checkpoint" in str(error), error
            continue
        assert found.step >= last, (found.step, last)
        assert found.trainer_state == {"step": found.step} and found.learner_counters == {"step": found.step}
        assert torch.equal(found.learner_tensors["w"], torch.full((50_000,), float(found.step)))
        assert (found.model_folder / "part_3.txt").read_bytes() == bytes([found.step % 251]) * 200_000
        for step in store.steps():
            store.load(step)
        patience = 0.12 if found.step > last else patience
        last = found.step
    print("LAST", last, "LEFTOVERS", sum(name.startswith(".") for name in os.listdir(folder)))
""")


def kill_the_writer(folder: Path, num_kills: int) -> int:
    """Kill a process that writes checkpoints that many times, verifying after each; returns the last step found."""
    finished = programs.run(
        [sys.executable, "-c", WRITER, str(folder), str(num_kills)], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return int(finished.stdout.split()[1])


def test_whenever_the_process_is_killed_the_latest_checkpoint_loads_and_is_the_newest_that_was_complete(
    folder: Path, store: CheckpointStore
) -> None:
    last = kill_the_writer(folder, num_kills=12)
    assert last > 0
    save(store, last + 1)
    assert all(name.startswith("step_") for name in names(folder))
    assert len(names(folder)) == 2


@pytest.mark.nightly
def test_eighty_kills_lose_no_checkpoint(folder: Path) -> None:
    assert kill_the_writer(folder, num_kills=80) > 0
