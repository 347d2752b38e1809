"""A program that is stopped while it is loaded: `python -m tests.support.stopped_start`."""

import os
import signal

if __name__ == "__main__":  # pytest imports each file for its doctests: its workers were stopped, and CI waited 90 minutes
    os.kill(os.getpid(), signal.SIGSTOP)
