"""Which calls of a session are not trained on, and why: the rules for what an agent does beside its task.

In this order:

1. What the capture already knows: the caller said no, a schema narrowed the choice, the sampling was another one.
2. What the caller wants to be trained on, is. The rules below are for calls that say nothing.
3. An answer that reached nobody, and on which nothing followed, was not part of what happened.
4. Calls that ask for the same thing (same conversation, tools and stop strings). If the conversation went on from some
   of them, the others were asked again: they are left out. If it went on from none, and nothing else was asked in
   between, nothing shows which answer was used: all are left out. Where other calls stand between them, as with an
   agent that shows its model only the present state, they are turns like any other.
5. A conversation of a single call without tools (a title, a summary) is beside the task if the session holds others of
   several calls, or with tools, and none of these has the same system message.

So a sub-agent of several calls, or with tools, is trained on, and so is a conversation that starts afresh under the
same system message because its context was compacted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from gspo_gym.remote.capture import CapturedCall, Untrained


def untrained_calls(calls: Sequence[CapturedCall]) -> dict[int, Untrained]:
    """The reason of each call that is not trained on, by its index. `calls` stand in the order in which they began."""
    reasons = {call.index: call.untrained for call in calls if call.untrained is not None}
    silent = [call for call in calls if call.untrained is None and call.is_trained is None]
    continued = {call.parent for call in calls}
    for call in silent:
        if not call.is_delivered and call.index not in continued:
            reasons[call.index] = Untrained.UNDELIVERED
    repeated = _repeated([call for call in calls if reasons.get(call.index) is not Untrained.UNDELIVERED], continued)
    for call in silent:
        if call.index in repeated:
            reasons.setdefault(call.index, repeated[call.index])
    auxiliary = _auxiliary(calls, reasons)
    for call in silent:
        if call.index in auxiliary:
            reasons.setdefault(call.index, Untrained.AUXILIARY)
    return reasons


def _repeated(calls: Iterable[CapturedCall], continued: set[int | None]) -> dict[int, Untrained]:
    """Calls that were asked again, or may have been."""
    reasons: dict[int, Untrained] = {}
    went_on = {call.request_key for call in calls if call.index in continued}
    for key, run in itertools.groupby(calls, key=lambda call: call.request_key):
        same = [call.index for call in run]
        if key in went_on:
            reasons |= {index: Untrained.RETRIED for index in same if index not in continued}
        elif len(same) > 1:
            reasons |= dict.fromkeys(same, Untrained.AMBIGUOUS)
    return reasons


def _auxiliary(calls: Sequence[CapturedCall], reasons: Mapping[int, Untrained]) -> set[int]:
    """Single calls beside the task."""
    by_index = {call.index: call for call in calls}
    trees: dict[int, list[CapturedCall]] = {}
    for call in calls:
        root = call
        while root.parent is not None:
            root = by_index[root.parent]
        if reasons.get(call.index) not in (Untrained.RETRIED, Untrained.UNDELIVERED):
            trees.setdefault(root.index, []).append(call)
    is_task = {root: len(tree) > 1 or any(call.tools_key for call in tree) for root, tree in trees.items()}
    systems = {_system_of(by_index[root]) for root, is_it in is_task.items() if is_it}
    return {
        tree[0].index
        for root, tree in trees.items()
        if not is_task[root] and systems and _system_of(by_index[root]) not in systems
    }


def _system_of(root: CapturedCall) -> str | None:
    """The system message of a conversation; None if it has none."""
    first = root.new_messages[0] if root.new_messages else None
    return first.content if first is not None and first.role == "system" else None
