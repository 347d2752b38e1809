"""Tiny runs that are trained once a process and then copied, for tests that only read a run or go on from one."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from gspo_gym.cli.train import run_training
from gspo_gym.config.run_config import RunConfig

_recorded: dict[str, Path] = {}


def record_run(config: RunConfig) -> dict[str, Any]:
    """Give `config.run_folder` a run of these settings, trained now or copied; return its summary.

    A copy is that of a folder that was moved: what names the run's own folder inside names the first one's.
    """
    values = config.model_dump(exclude_none=True)
    values["run"]["folder"] = ""
    settings = json.dumps(values, sort_keys=True, default=str)
    if settings not in _recorded:
        folder = Path(tempfile.mkdtemp(prefix="recorded_run_"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        values["run"]["folder"] = str(folder)
        first = RunConfig.from_dict(values)
        run_training(first)
        _recorded[settings] = first.run_folder
    shutil.copytree(_recorded[settings], config.run_folder)
    summary: dict[str, Any] = json.loads((config.run_folder / "summary.json").read_text())
    return summary
