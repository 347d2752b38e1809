"""Runs that cannot learn, or cannot go on, come to a named end within ten batches and say so in their folder."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from full_disk import mounted_disk

from gspo_gym.cli.train import run_training
from gspo_gym.config.run_config import RunConfig
from gspo_gym.env.core import TextEnv
from gspo_gym.env.registry import register
from gspo_gym.errors import NonFiniteError, RolloutError, StorageError, StuckError
from gspo_gym.run.records import read_metrics
from gspo_gym.seeding import training_seed

ROOT = Path(__file__).parents[2]


class Stubborn(TextEnv):
    """Fails where it is told to; else pays the letters, or the same for all; fills the disk of a file, once."""

    def __init__(self, fails_in: str = "", pays: str = "letters", fills: str = "") -> None:
        super().__init__()
        self.fails_in, self.pays, self.fills = fails_in, pays, fills

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed, options=options)
        if self.fails_in == "reset":
            raise RuntimeError("the server is down")
        if self.fills and training_seed(0, 8) == seed:  # of the fifth step, if two groups are played a step
            with contextlib.suppress(OSError), Path(self.fills).open("wb", buffering=0) as file:
                while file.write(bytes(2**16)):
                    pass
        return "letters", {}

    def step(self, action: Any) -> Any:
        if self.fails_in == "step":
            raise RuntimeError("the server is down")
        return "", sum(map(ord, action)) % 97 / 97 if self.pays == "letters" else 0.5, True, False, {}


@pytest.fixture(autouse=True)
def env() -> Any:
    register("test_stuck/Stubborn-v0", entry_point=Stubborn)
    yield
    gymnasium.registry.pop("test_stuck/Stubborn-v0")


def make_config(folder: Path, *, num_steps: int = 40, weight_decay: float = 0.0, **env_config: str) -> RunConfig:
    return RunConfig.from_dict(
        {
            "run": {"folder": str(folder)},
            "algorithm": {"variety": "gspo_token"},
            "model": {"base": "tiny:qwen3-64", "label": "stuck"},
            "rollout": {
                "env_name": "test_stuck/Stubborn-v0",
                "env_config": env_config,
                "isolation": "thread",
                "max_turns": 1,
                "max_output_tokens": 2,
                "max_model_len": 64,
                "episodes_per_batch": 4,
            },
            "training": {
                "iterations_per_epoch": num_steps,
                "group_size": 2,
                "batch_size": 2,
                "learning_rate": 1e-3,
            },
            "loss": {},
            "optimizer": {"weight_decay": weight_decay},
            "evaluation": {"seeds": "0:1", "every_n_iters": 100},
        }
    )


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"pays": "the same"}, StuckError),
        ({"fails_in": "reset"}, RolloutError),
        ({"fails_in": "step"}, RolloutError),
        ({"weight_decay": 1e38}, NonFiniteError),  # the first step leaves weights of 1e33
    ],
    ids=["nothing to learn", "no reset works", "no step works", "not finite"],
)
def test_a_run_that_cannot_go_on_ends_by_name_within_ten_batches(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error) as ended:
        run_training(make_config(tmp_path, **changes))
    summary = json.loads((tmp_path / "stuck" / "summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == "failed"
    assert type(ended.value).__name__ in summary["error"]
    assert len(read_metrics(tmp_path / "stuck")) <= 10


def test_a_disk_that_fills_up_ends_a_run_by_name_and_it_goes_on_when_there_is_room(tmp_path: Path) -> None:
    with mounted_disk(tmp_path / "disk", 2**25) as disk:
        ballast = disk.folder / "ballast"
        config = make_config(disk.folder, num_steps=8, fills=str(ballast))
        with pytest.raises(StorageError, match="No space left on device"):
            run_training(config)
        assert len(read_metrics(disk.folder / "stuck")) <= 5
        ballast.unlink()
        ballast.mkdir()  # it cannot be filled again
        assert run_training(config, resume=True)["status"] == "completed"
        assert [line["step"] for line in read_metrics(disk.folder / "stuck")] == list(range(1, 9))


def test_no_part_of_a_run_measures_a_duration_by_a_clock_that_people_set() -> None:
    """A clock that jumps by an hour changes what is written down as the time of day, and nothing else."""
    writes_it_down = {"env/watchdog.py", "run/process.py", "run/recording.py"}
    package = ROOT / "gspo_gym"
    rooms = ("base", "env", "chat", "engine", "learning", "rollout", "policy", "judge", "run", "config")
    found = {
        path.relative_to(package).as_posix()
        for room in rooms
        for path in (package / room).rglob("*.py")
        if re.search(r"\btime\.time\b|datetime\.(now|utcnow|today)\b|CLOCK_REALTIME", path.read_text(encoding="utf-8"))
    }
    assert found == writes_it_down
