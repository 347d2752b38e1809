"""A program that is stopped while it is loaded: `python -m tests.support.stopped_start`."""

import os
import signal

# Not on import: pytest imports each file for its doctests, and all of its workers were stopped.
if __name__ == "__main__":
    os.kill(os.getpid(), signal.SIGSTOP)
