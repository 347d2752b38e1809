"""The places of vLLM's parallel ranks: the cores of a processor, and the copy of the model that a session stays with.

Does not import vLLM. Read with vLLM 0.32.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence

# The cores of each worker: lists by rank, or "nobind" for any that the system chooses.
BINDING = "VLLM_CPU_OMP_THREADS_BIND"


def binding_of(num_workers: int, cores: Sequence[int]) -> str:
    """Return the value of `BINDING` that gives every worker of a processor equally many cores, and none twice.

    vLLM's own choice is one NUMA node for each rank of a tensor-parallel model: with fewer nodes it does not start. It
    binds the copies of a data-parallel one to the same cores. If there are fewer cores than workers, none is bound.

    >>> binding_of(2, [0, 1, 2, 3, 4])
    '0,1|2,3'
    >>> binding_of(4, [0, 1])
    'nobind'
    """
    each = len(cores) // num_workers
    if each == 0:
        return "nobind"
    lists = (cores[rank * each : (rank + 1) * each] for rank in range(num_workers))
    return "|".join(",".join(str(core) for core in some) for some in lists)


def allowed_cores() -> list[int]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Let children started within inherit these variables; those that are set already stay as they are."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


class SessionRanks:
    """The copies of a data-parallel model that answer sessions: always the same one, because it has the prefix.

    New sessions go round all copies.

    >>> ranks = SessionRanks(2)
    >>> [ranks.of(session) for session in ("a", "b", "a", "c", "b", None)]
    [0, 1, 0, 0, 1, None]
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._turns = itertools.cycle(range(num_ranks))
        self._rank_of: dict[str, int] = {}

    def of(self, session_id: str | None) -> int | None:
        """Return the rank of the copy; None, which leaves it to vLLM, without a session or without copies."""
        if session_id is None or self._num_ranks == 1:
            return None  # vLLM chooses by load
        if session_id not in self._rank_of:
            self._rank_of[session_id] = next(self._turns)
        return self._rank_of[session_id]

    def forget(self, session_id: str) -> None:
        """Forget a session that has ended; unknown ones are fine."""
        self._rank_of.pop(session_id, None)
