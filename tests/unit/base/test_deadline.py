"""What a program's deadline leaves to its forks; what it does at signals is tested where programs are stopped."""

from __future__ import annotations

import sys

import programs

FORK = """
import os
from gspo_gym.base.deadline import Deadline

def work():
    with Deadline(30.0, outcome="nothing").handling_signals(print):
        pass

work()
child = os.fork()
if child == 0:
    work()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_of_a_program_that_had_a_deadline_may_have_one_too() -> None:
    # The threads in which glibc read for the program are not in the fork.
    done = programs.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "7\n"
