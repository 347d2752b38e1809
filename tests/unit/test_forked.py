"""Tests in a fork of pytest end as they would here, and what they do to their process leaves pytest alone."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest
from forked import forked
from full_disk import small_disk
from own_signals import signal_this_process


def test_a_forked_test_passes_fails_and_is_skipped_here_as_there(capfd: pytest.CaptureFixture[str]) -> None:
    def told(number: int) -> None:
        print("number", number)
        if number == 1:
            assert number == 2, "one of them is odd"
        if number == 2:
            pytest.skip("two is skipped")

    forked(told)(0)
    with pytest.raises(pytest.fail.Exception, match=r"(?s)in told.*AssertionError: one of them is odd"):
        forked(told)(1)
    with pytest.raises(pytest.skip.Exception, match="two is skipped"):
        forked(told)(2)
    assert capfd.readouterr().out.split("\n") == ["number 0", "number 1", "number 2", ""]


def test_a_forked_test_that_ends_its_process_fails() -> None:
    with pytest.raises(pytest.fail.Exception, match="ended with -9 before its end"):
        forked(lambda: os.kill(os.getpid(), signal.SIGKILL))()


def test_a_limit_on_files_is_set_in_a_fork_and_pytest_writes_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("x" * 100_000)

    def fill() -> None:
        with small_disk(tmp_path / "disk", 4096, may_mount=False), log.open("a") as file:
            with pytest.raises(OSError, match="File too large"):
                os.write(file.fileno(), b"y")
            os._exit(3)  # while the limit holds

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(pytest.fail.Exception, match="ended with 3"):
        forked(fill)()
    assert resource.getrlimit(resource.RLIMIT_FSIZE) == before
    with log.open("a") as file:
        file.write("z")
    assert log.stat().st_size == 100_001


def test_a_limit_on_files_is_refused_in_pytests_own_process(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="@forked"), small_disk(tmp_path / "disk", 4096, may_mount=False):
        pass
    assert not (tmp_path / "disk").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_nothing_handles_is_not_sent_to_pytest(number: int) -> None:
    with pytest.raises(AssertionError, match="which would end pytest"):
        signal_this_process(number)
