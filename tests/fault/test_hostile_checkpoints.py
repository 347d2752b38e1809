"""Checkpoints made to do harm: nothing in them is run, nothing is written, and each is refused as a CheckpointError.

Each has a manifest that fits its files, as an attacker would give it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import llama, write_gguf
from safetensors.torch import load_file, save_file

from gspo_gym.errors import CheckpointError, GymError
from gspo_gym.learning.saved import copy_state
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.checkpoints import CheckpointStore
from gspo_gym.policy.load import adapt_policy, load_policy, load_tokenizer, save_policy
from gspo_gym.policy.manifest import Origin, seal
from gspo_gym.run.state import TrainState

CANARY = "canary"
Harm = Callable[[Path], None]  # what it does to the folder of a checkpoint


class Payload:
    """Makes a file named `canary` in the test's folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._command = f"touch {folder.parents[1] / CANARY}"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self._command,)


class Learner:
    """Has the state of one parameter."""

    def copy_state(self) -> Callable[[Path], None]:
        return copy_state({"optimizer.exp_avg.w": torch.zeros(3)})

    def counters(self) -> dict[str, int]:
        return {"learner.num_updates": 1}


def pickled(name: str) -> Harm:
    def harm(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(pickle.dumps(Payload(folder)))

    return harm


def torch_saved(name: str) -> Harm:
    def harm(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        torch.save(Payload(folder), folder / name)

    return harm


def text(name: str, content: str | bytes) -> Harm:
    return lambda folder: (
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content) and None
    )


def json_with(name: str, **values: Any) -> Harm:
    def harm(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values, indent=2))

    return harm


def header(name: str, values: Any, *, length: int | None = None) -> Harm:
    encoded = values if isinstance(values, bytes) else json.dumps(values).encode()
    size = len(encoded) if length is None else length
    return text(name, size.to_bytes(8, "little") + encoded + bytes(16))


def tensor(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def linked(name: str, target: str) -> Harm:
    def harm(folder: Path) -> None:
        seal(folder, step=5, origin=Origin())
        outside = folder.parents[1] / "outside"
        outside.mkdir()
        if (folder / name).exists():
            (folder / name).rename(outside / name)
        (folder / name).symlink_to(target.format(outside=outside))

    return harm


def pipe(name: str) -> Harm:
    def harm(folder: Path) -> None:
        seal(folder, step=5, origin=Origin())
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return harm


def sharded(name: str) -> Harm:
    """The index of a model in parts, which says that a part is elsewhere."""

    def harm(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        save_file(weights, target, {"format": "pt"})
        index = {"metadata": {}, "weight_map": dict.fromkeys(weights, name)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return harm


def listing(name: str) -> Harm:
    """A manifest that lists a file, with the digest that fits."""

    def harm(folder: Path) -> None:
        seal(folder, step=5, origin=Origin())
        path = folder / "manifest.json"
        values = json.loads(path.read_text())
        values["files"][name] = {"bytes": 0, "sha256": "0" * 64}
        reseal(path, values)

    return harm


def manifest(change: Callable[[dict[str, Any]], Any]) -> Harm:
    def harm(folder: Path) -> None:
        seal(folder, step=5, origin=Origin())
        path = folder / "manifest.json"
        values = json.loads(path.read_text())
        change(values)
        reseal(path, values)

    return harm


def reseal(path: Path, values: dict[str, Any]) -> None:
    """Without a digest, as those of earlier versions were."""
    values.pop("digest", None)
    path.write_text(json.dumps(values | {"schema": 1}, indent=2) + "\n")


STATE, TENSORS, WEIGHTS = "resume/state.json", "resume/learner.safetensors", "model.safetensors"
CODE = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": [None, "evil.Tokenizer"]}


def with_code(name: str, **values: Any) -> Harm:
    def harm(folder: Path) -> None:
        json_with(name, auto_map=CODE, **values)(folder)
        (folder / "evil.py").write_text(f"open({str(folder.parents[1] / CANARY)!r}, 'w').close()")

    return harm


HOSTILE: dict[str, Harm] = {
    "a pickle for weights": torch_saved("pytorch_model.bin"),
    "a pickle for an adapter": torch_saved("adapter_model.bin"),
    "a pickle named safetensors": pickled(WEIGHTS),
    "a pickle for the learner's tensors": pickled(TENSORS),
    "a pickle for the state": pickled(STATE),
    "a pickle beside the rest": pickled("training_args.bin"),
    "a pickle of an optimizer": pickled("resume/optimizer.PT"),
    "a pickle of a scheduler": pickled("resume/scheduler.pkl"),
    "an array of objects": pickled("vectors.npy"),
    "code for an unknown model": with_code("config.json", model_type="evil"),
    "code for the tokenizer": with_code("tokenizer_config.json", tokenizer_class="EvilTokenizer"),
    "a file above": listing("../step_000004/model.safetensors"),
    "a file above, further in": listing("resume/../../../outside"),
    "an absolute path": listing("/etc/passwd"),
    "a path with a NUL": listing("a\0b"),
    "a path of nothing": listing(""),
    "a path of another system": listing("C:\\windows\\system.ini"),
    "weights outside, by an index": sharded("../../outside/model-1.safetensors"),
    "a link for weights": linked(WEIGHTS, "{outside}/" + WEIGHTS),
    "a link for the manifest's folder": linked("base", "{outside}"),
    "a link to nothing": linked("generation.json", "/nowhere"),
    "a link to a device": linked("chat_template.jinja", "/dev/zero"),
    "a pipe for the manifest": pipe("manifest.json"),
    "a pipe for the chat template": pipe("chat_template.jinja"),
    "a header of a gigabyte": header(WEIGHTS, {}, length=10**9),
    "a learner's header of a gigabyte": header(TENSORS, {}, length=10**9),
    "a header of more than memory": header(TENSORS, {}, length=2**63 - 1),
    "a header that is no JSON": header(TENSORS, b"{" * 64),
    "tensors in the same place": header(TENSORS, {"a": tensor([4], 0, 16), "b": tensor([4], 0, 16)}),
    "a tensor beyond the file": header(TENSORS, {"a": tensor([10**6], 0, 4 * 10**6)}),
    "a tensor larger than memory": header(TENSORS, {"a": tensor([2**40, 2**40], 0, 16)}),
    "a tensor of an unknown type": header(TENSORS, {"a": tensor([4], 0, 16, "OBJECT")}),
    "a state with a key twice": text(STATE, '{\n  "counters": {},\n  "trainer": {},\n  "trainer": {}\n}'),
    "a state nested without end": text(STATE, "[" * 200_000),
    "a state with a number beyond float64": text(STATE, '{\n  "counters": {\n    "a": 1e999\n  },\n  "trainer": {}\n}'),
    "a state with an endless integer": text(STATE, '{"counters": {"a": ' + "9" * 9000 + '}, "trainer": {}}'),
    "a state with a large integer": json_with(STATE, counters={"learner.num_updates": 10**400}),
    "a state of lists": json_with(STATE, counters=[1], trainer=[2]),
    "a state that is no text": text(STATE, b"\xff\xfe\0{}"),
    "a trainer's state of texts": json_with(STATE, trainer={"step": "5", "curve": "5"}),
    "a model larger than memory": json_with("config.json", hidden_size=2**40, head_dim=2**40, vocab_size=2**40),
    "a model of other shapes": json_with("config.json", vocab_size=7),
    "a model's configuration nested without end": text("config.json", "[" * 200_000),
    "a tokenizer that is none": text("tokenizer.json", "[]"),
    "a step below 0": manifest(lambda values: values.update(step=-5)),
    "a manifest of a billion bytes": manifest(lambda values: values["files"][STATE].update(bytes=10**9)),
}  # fmt: skip


# A tokenizer's file is read without it.
PASSED_BY = {"code for the tokenizer"}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = CheckpointStore(tmp_path_factory.mktemp("sound"))
    state = TrainState(step=5).to_dict()
    return store.save(5, policy=load_policy("tiny:qwen3-64"), learner=Learner(), trainer_state=state)


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file below, with size and time of its last change."""
    found = ((path, path.lstat()) for path in folder.rglob("*"))
    return {str(path): (stat.st_size, stat.st_mtime_ns) for path, stat in found}


def test_there_are_more_than_forty() -> None:
    assert len(HOSTILE.keys() - PASSED_BY) >= 40


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_checkpoint_is_refused_and_does_nothing(name: str, sound: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / sound.name
    shutil.copytree(sound, folder)
    (folder / "manifest.json").unlink()
    HOSTILE[name](folder)
    if not (folder / "manifest.json").exists():
        seal(folder, step=5, origin=Origin())
    before = tree(tmp_path)
    refusals = []

    def resume() -> None:
        found = CheckpointStore(folder.parent).load(5)
        TrainState.from_dict(found.trainer_state)
        load_policy(str(found.model_folder))

    for use in (resume, lambda: load_policy(str(folder))):
        try:
            use()
        except CheckpointError as error:
            refusals.append(str(error))
    assert refusals or name in PASSED_BY, "nothing of it is refused"
    assert all(len(refusal) < 2000 for refusal in refusals)
    assert tree(tmp_path) == before
    assert not (tmp_path / CANARY).exists()


def write_adapter(folder: Path) -> None:
    save_policy(adapt_policy(load_policy("tiny:qwen3-64"), LoraSettings(), seed=0), folder)


def write_gguf_file(folder: Path) -> None:
    folder.mkdir()
    write_gguf(folder / "model.gguf", llama())


READERS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "model": (lambda folder: load_policy("tiny:qwen3-64").tokenizer.save_pretrained(folder), load_tokenizer),
    "adapter": (write_adapter, load_policy),
    "gguf": (write_gguf_file, load_policy),
}  # who writes a folder, and who reads it


@pytest.mark.parametrize("kind", READERS)
def test_code_beside_a_model_is_not_run_though_the_terminal_says_yes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda prompt="": asked.append(prompt) or "y")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "models" / kind
    folder.parent.mkdir()
    write, read = READERS[kind]
    write(folder)
    if not (config := folder / "tokenizer_config.json").exists():
        config.write_text("{}")
    with_code(config.name, tokenizer_class="EvilTokenizer")(folder)
    with contextlib.suppress(GymError):
        read(str(folder))
    assert asked == []
    assert not (tmp_path / CANARY).exists()


def test_a_link_to_a_sound_checkpoint_is_none(sound: Path, tmp_path: Path) -> None:
    (tmp_path / sound.name).symlink_to(sound)
    with pytest.raises(CheckpointError, match="step_000005: is a link"):
        CheckpointStore(tmp_path).load(5)
