"""Signals that a test sends to pytest's own process, which the code under test is to handle."""

from __future__ import annotations

import os
import signal


def signal_this_process(number: int) -> None:
    """Send the signal.

    Raises:
        AssertionError: nothing handles it, so that it would end pytest.
    """
    standard = (signal.SIG_DFL, signal.default_int_handler)
    assert signal.getsignal(number) not in standard, f"nothing handles signal {number}, which would end pytest"
    os.kill(os.getpid(), number)
