"""Which calls of a session are not trained on, and why: the rules for what an agent does beside its task.

In this order:

1. What the capture already knows: the caller said no, a schema narrowed the choice, the sampling was another one.
2. What the caller wants to be trained on, is. The rules below are for calls that say nothing.
3. An answer that reached nobody, and on which nothing followed, was not part of what happened.
4. A conversation of a single call without tools (a title, a summary) is beside the task if the session holds others of
   several calls, or with tools, and none of these has the same system message. Several single calls under one system
   message are no title, but an agent that shows its model only the present state.

Calls that ask for the same thing are turns like any other if their answers were delivered: what asks again for an
answer that was lost is recognised before anything is sampled for it (`replay.py`), so that two answers are two draws
from the policy, and leaving one of them out would select by what they say.

So a sub-agent of several calls, or with tools, is trained on, and so is a conversation that starts afresh under the
same system message because its context was compacted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from gspo_gym.remote.gateway.capture import CapturedCall, Untrained


def untrained_calls(calls: Sequence[CapturedCall]) -> dict[int, Untrained]:
    """The reason of each call that is not trained on, by its index. `calls` stand in the order in which they began."""
    reasons = {call.index: call.untrained for call in calls if call.untrained is not None}
    silent = [call for call in calls if call.untrained is None and call.is_trained is None]
    continued = {call.parent for call in calls}
    for call in silent:
        if not call.is_delivered and call.index not in continued:
            reasons[call.index] = Untrained.UNDELIVERED
    auxiliary = _auxiliary(calls, reasons)
    for call in silent:
        if call.index in auxiliary:
            reasons.setdefault(call.index, Untrained.AUXILIARY)
    return reasons


def _auxiliary(calls: Sequence[CapturedCall], reasons: Mapping[int, Untrained]) -> set[int]:
    """Return the indices of the single calls beside the task."""
    by_index = {call.index: call for call in calls}
    trees: dict[int, list[CapturedCall]] = {}
    for call in calls:
        root = call
        while root.parent is not None:
            root = by_index[root.parent]
        if reasons.get(call.index) is not Untrained.UNDELIVERED:
            trees.setdefault(root.index, []).append(call)
    num_trees = Counter(_system_of(by_index[root]) for root in trees)
    is_task = {
        root: len(tree) > 1
        or any(call.tools_key for call in tree)
        or ((system := _system_of(by_index[root])) is not None and num_trees[system] > 1)
        for root, tree in trees.items()
    }
    systems = {_system_of(by_index[root]) for root, is_it in is_task.items() if is_it}
    return {
        tree[0].index
        for root, tree in trees.items()
        if not is_task[root] and systems and _system_of(by_index[root]) not in systems
    }


def _system_of(root: CapturedCall) -> str | None:
    """The system message of a conversation; None if it has none."""
    first = root.new_messages[0]  # of a conversation that continues none, whose prompt is not empty
    return first.content if first.role == "system" else None
