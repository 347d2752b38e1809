"""A test that runs in a fork of pytest: the limits that it sets and the signals that it gets leave pytest alone."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import ParamSpec

import pytest

_Parameters = ParamSpec("_Parameters")

_MAX_SECONDS = 600  # less than pytest's own limit, which would end pytest
_children: list[int] = []  # in a child: its process id


def is_forked() -> bool:
    """Return whether this process is the child that runs a forked test."""
    return os.getpid() in _children


def forked(test: Callable[_Parameters, None]) -> Callable[_Parameters, None]:
    """Run the test in a child of this process, and fail or skip here as it does there.

    The fixtures are made and ended here. What the test changes in memory is gone with the child, which has no thread of
    this process.
    """

    @functools.wraps(test)
    def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> None:
        _flush()  # or the child would write it, too
        read_end, write_end = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads of other tests wait, and are not in the child
            child = os.fork()
        if child == 0:
            os.close(read_end)
            _run_in_child(functools.partial(test, *args, **kwargs), write_end)
        os.close(write_end)
        with os.fdopen(read_end, encoding="utf-8") as pipe:
            if not select.select([pipe], [], [], _MAX_SECONDS)[0]:
                os.kill(child, signal.SIGABRT)  # pytest's faulthandler writes where it hangs
            report = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if not report:
            pytest.fail(f"the test's process ended with {code} before its end", pytrace=False)
        end, text = json.loads(report)
        if end == "skipped":
            pytest.skip(text)
        if end == "failed":
            pytest.fail(text, pytrace=False)

    return run


def _run_in_child(test: Callable[[], None], write_end: int) -> None:
    """Call the test, write how it ended, and end the process."""
    try:
        _children.append(os.getpid())
        end, text = "passed", ""
        try:
            test()
        except pytest.skip.Exception as skip:
            end, text = "skipped", str(skip)
        except BaseException:
            end, text = "failed", traceback.format_exc()
        with os.fdopen(write_end, "w", encoding="utf-8") as pipe:
            json.dump([end, text], pipe)
        _flush()
    finally:
        os._exit(0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a limit on the size of files
            stream.flush()
