"""A run whose processes are lost ends as an undisturbed one; `python -m benchmarks chaos` takes forty from it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import gspo_gym
from benchmarks.chaos import (
    CUTS,
    FAULTS,
    OF_RANKS,
    OF_RAY,
    OF_REPLICAS,
    OF_THE_REFERENCE,
    SAME,
    ChaosReport,
    Done,
    Fault,
    drawn,
    is_probe_of_tempfile,
    processes_below,
)


@pytest.mark.nightly
def test_a_run_whose_processes_are_lost_ends_as_an_undisturbed_one() -> None:
    command = [sys.executable, "-m", "benchmarks", "chaos", "--count", "2", "--steps", "4", "--seed", "1"]
    command += ["--replicas", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as it should be" in done.stdout
    assert "0, 0 of 16" in done.stdout  # 4 steps of 4 episodes, of which none was lost or kept twice
    assert "NOT NOTICED" not in done.stdout


def test_each_kind_of_fault_has_its_share_whatever_the_seed() -> None:
    for seed in range(5):
        faults = Counter(drawn(np.random.default_rng(seed), 2 * len(FAULTS) + 1))
        assert sum(faults.values()) == 2 * len(FAULTS) + 1
        assert all(faults[fault] >= 2 * number for fault, number in Counter(FAULTS).items())


def test_processes_are_found_with_their_parents_and_command_lines() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        while len(found := [each for each in processes_below(os.getpid()) if each.command.endswith("-c input() ")]) < 1:
            pass
        assert [each.parent for each in found] == [child.pid]
        assert [each.parent for each in processes_below(os.getpid()) if each.pid == child.pid] == [os.getpid()]
        child.kill()
        os.kill(found[0].pid, 9)


@pytest.mark.parametrize("call", ["write", "close", "unlink"])
def test_of_what_is_left_only_the_probe_of_a_process_killed_in_tempfile_is_pythons(call: str, tmp_path: Path) -> None:
    code = f"import os, tempfile; os.{call} = lambda *_: os.kill(os.getpid(), 9); tempfile.gettempdir()"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == -9
    (probe,) = tmp_path.iterdir()
    assert is_probe_of_tempfile(probe)
    for name, content in (("a" * 8, b"blatt"), ("a" * 7, b"blat"), ("tmp" + "a" * 8, b""), ("A" * 8, b"")):
        ours = tmp_path / name
        ours.write_bytes(content)
        assert not is_probe_of_tempfile(ours)
    (tmp_path / ("b" * 8)).mkdir()
    assert not is_probe_of_tempfile(tmp_path / ("b" * 8))


def test_a_report_is_good_only_if_all_was_done_and_nothing_is_lost_twice_left_or_different() -> None:
    done = Done(Fault("rank", "kill"), 3, "learning", 0.0, recovered_seconds=1.0)
    good = ChaosReport(1, faults=[done], weights=SAME, moments=1.0, controls={"a weight": True})
    assert good.is_good
    assert not replace(good, num_wanted=2).is_good
    assert not replace(good, weights=2 * SAME).is_good
    assert not replace(good, controls={}).is_good
    assert not replace(good, controls={"a weight": True, "an end": False}).is_good
    for name in ("failed", "left", "lost", "twice", "differing"):
        assert not replace(good, **{name: ["something"]}).is_good, name


def test_the_page_of_the_cluster_says_of_each_fault_what_happens() -> None:
    page = Path(gspo_gym.__file__).with_name("cluster").joinpath("README.md").read_text(encoding="utf-8")
    rows = [line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if line.startswith("| ")]
    missing = {str(fault) for fault in (*FAULTS, *OF_RANKS, *CUTS, *OF_REPLICAS, *OF_THE_REFERENCE, *OF_RAY)} - {*rows}
    assert missing == set()
