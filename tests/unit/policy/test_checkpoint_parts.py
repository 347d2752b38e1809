"""Checkpoints of which ranks wrote parts: exact, refused if a part is missing, and published whole or not at all."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import programs
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gspo_gym.errors import CheckpointError
from gspo_gym.learning.saved import SavedTensors, copy_state

WHOLE = torch.arange(15.0).reshape(5, 3)


def write_part(folder: Path, rank: int, tensors: dict[str, Tensor], first_rows: dict[str, int]) -> None:
    """Write by safetensors itself, and not by the code that is tested."""
    file = folder / f"learner-{rank:05d}-of-00003.safetensors"
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, file, {"first_rows": json.dumps(first_rows)})


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """Parts of three ranks, of which the last has no row of the short tensor; the first holds a count, too."""
    short = torch.tensor([1.5, 2.5], dtype=torch.bfloat16)
    counted = {"w": WHOLE[:2], "short": short[:1], "step": torch.tensor(7.0)}
    write_part(tmp_path, 0, counted, {"w": 0, "short": 0})
    write_part(tmp_path, 1, {"w": WHOLE[2:4], "short": short[1:]}, {"w": 2, "short": 1})
    write_part(tmp_path, 2, {"w": WHOLE[4:], "short": short[2:]}, {"w": 4, "short": 2})
    return tmp_path


def test_parts_are_read_as_whole_tensors_and_by_rows(parts: Path) -> None:
    saved = SavedTensors.of_learner(parts)
    assert (set(saved), len(saved), saved.folder) == ({"w", "short", "step"}, 3, parts)
    assert torch.equal(saved["w"], WHOLE)
    assert saved["short"].tolist() == [1.5, 2.5]
    assert saved["short"].dtype == torch.bfloat16
    assert saved["step"].item() == 7.0
    assert (saved.shape("w"), saved.shape("step")) == ((5, 3), ())
    for first in range(6):
        for end in range(first, 6):
            assert torch.equal(saved.rows("w", slice(first, end)), WHOLE[first:end])


def test_what_one_process_copies_comes_back_whatever_happens_to_the_original(tmp_path: Path) -> None:
    held = {"w": WHOLE.clone(), "t": WHOLE.T, "empty": torch.empty(0, 4), "flag": torch.tensor([True, False])}
    expected = {name: tensor.clone() for name, tensor in held.items()}
    write = copy_state(held)
    held["w"].zero_()
    write(tmp_path)
    saved = SavedTensors.of_learner(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["learner.safetensors"]
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items())
    assert saved.keys() == expected.keys()


def overlapping(folder: Path) -> None:
    write_part(folder, 1, {"w": WHOLE[1:4]}, {"w": 1})


def of_another_shape(folder: Path) -> None:
    write_part(folder, 2, {"w": torch.zeros(1, 4)}, {"w": 4})


def of_another_dtype(folder: Path) -> None:
    write_part(folder, 2, {"w": torch.zeros(1, 3, dtype=torch.float64)}, {"w": 4})


def whole_twice(folder: Path) -> None:
    write_part(folder, 2, {"step": torch.tensor(8.0)}, {})


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: (folder / "learner-00002-of-00003.safetensors").unlink(), "learner-00002-of-00003"),
        (lambda folder: (folder / "learner-00000-of-00003.safetensors").unlink(), "learner-00000-of-00003"),
        (overlapping, "w: expected rows from 2 on"),
        (of_another_shape, r"w: expected rows from 4 on, as torch\.float32 and \[3\], got row 4 on, .* \[4\]"),
        (of_another_dtype, r"w: expected rows from 4 on, as torch\.float32"),
        (whole_twice, "step: expected rows"),
        (lambda folder: write_part(folder, 1, {"w": WHOLE[2:4]}, {"w": -2}), "expected the number of its first row"),
        (lambda folder: (folder / "learner-00001-of-00003.safetensors").write_bytes(b"\x80\x04"), "cannot be read"),
    ],
)
def test_parts_that_are_no_whole_are_refused_by_name(parts: Path, harm: Callable[[Path], None], message: str) -> None:
    harm(parts)
    with pytest.raises(CheckpointError, match=message):
        SavedTensors.of_learner(parts)


def test_a_part_that_is_gone_when_its_tensor_is_asked_for_is_an_error(parts: Path) -> None:
    saved = SavedTensors.of_learner(parts)
    (parts / "learner-00001-of-00003.safetensors").unlink()
    assert torch.equal(saved.rows("w", slice(0, 2)), WHOLE[:2])
    with pytest.raises(CheckpointError, match="w cannot be read"):
        saved["w"]


# Forks after the imports. The hook of a child counts what it is about to do to files, and kills it before one of them.
PUBLISHER = textwrap.dedent("""
    import json, os, shutil, signal, sys
    from pathlib import Path
    import torch
    from safetensors.torch import save_file
    from gspo_gym.policy.checkpoints import CheckpointStore

    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    TOUCHES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}

    def write_policy(number):
        def write(target):
            target.mkdir(parents=True)
            (target / "model.txt").write_text(str(number))
        return write

    class TwoRanks:
        def __init__(self, number):
            self.number = number
        def counters(self):
            return {"number": self.number}
        def copy_state(self):
            def write(target):
                for rank, rows in enumerate((slice(0, 3), slice(3, 5))):
                    file = target / f"learner-{rank:05d}-of-00002.safetensors"
                    first = {"first_rows": json.dumps({"w": rows.start})}
                    save_file({"w": torch.full((5, 3), float(self.number))[rows].clone()}, file, first)
                    os.close(os.open(file, os.O_RDONLY))  # a moment between two ranks' files
            return write

    def save(step, number):
        store = CheckpointStore(folder, copy_policy=write_policy)
        store.save(step, policy=number, learner=TwoRanks(number), trainer_state={"number": number})

    def die_at(number):
        count = 0
        def look(event, arguments):
            nonlocal count
            if event in TOUCHES:
                count += 1
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(look)

    def forked(work):
        child = os.fork()
        if child == 0:
            work()
            os._exit(0)
        return os.waitpid(child, 0)[1]

    for step in (2, 3):  # replaces the newest, or makes another, for which the oldest goes
        kills = 0
        while True:
            shutil.rmtree(folder, ignore_errors=True)
            for number in (1, 2):
                save(number, number)
            status = forked(lambda: (die_at(kills + 1), save(step, 9)))
            found = CheckpointStore(folder).load_latest()
            number = found.trainer_state["number"]
            assert number in (2, 9) and found.step == (step if number == 9 else 2), (step, kills, number)
            assert found.learner_counters == {"number": number}
            assert torch.equal(found.learner_tensors["w"], torch.full((5, 3), float(number)))
            assert (found.folder / "model.txt").read_text() == str(number)
            save(4, 4)
            assert not [name for name in os.listdir(folder) if not name.startswith("step_")], os.listdir(folder)
            if status == 0:
                assert number == 9
                break
            assert status == signal.SIGKILL
            kills += 1
        print("KILLS", kills)
""")


@pytest.mark.slow
def test_a_kill_before_each_step_of_publishing_leaves_the_older_or_the_newer_checkpoint_whole(tmp_path: Path) -> None:
    done = programs.run(
        [sys.executable, "-c", PUBLISHER, str(tmp_path / "checkpoints")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    kills = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(kills) == 2
    assert min(kills) >= 20  # of writing, sealing, renaming and removing
