"""A program that is stopped while it is loaded: `python -m tests.support.stopped_start`."""

import os
import signal

os.kill(os.getpid(), signal.SIGSTOP)
