"""Turn a frozen session into the parts of a `Trajectory`: which calls are trained on, and in which segments.

Calls form trees: a call whose prompt appends to another's tokens is its child. Each path from a root to a leaf is one
segment, as the model read it. A completion is trained on in the first path that holds it and is context in others;
every trained completion counts exactly once, however the agent branched. If none is trained on, the delivered ones are
masked turns: the episode was played and its return belongs to its group's statistics.

A call is not trained on by these rules, in this order:

1. The capture knows a reason: the caller said no, a schema narrowed the choice, or the sampling was another one.
2. A call that the caller wants to be trained on, is. The rules below are for calls that say nothing.
3. An answer that was not delivered, and on which nothing followed, is no part of the episode.
4. A conversation of a single call without tools (a title, a summary) is beside the task if the session holds others of
   several calls, or with tools, and none of these has the same system message. Several single calls under one system
   message are no titles: such an agent shows its model only the present state.

Calls that ask for the same thing are ordinary turns if their answers were delivered: a retry of a lost answer is
recognised before anything is sampled (`replay.py`), so two answers are two draws from the policy, and leaving one out
would select by what they say. A sub-agent of several calls, or with tools, is trained on, and so is a conversation that
starts afresh under the same system message because its context was compacted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gspo_gym.remote.gateway.capture import Capture, CapturedCall, Untrained
from gspo_gym.rollout.record import OpenSegment
from gspo_gym.types import Message, Segment, Turn

CallKind = Literal["root", "extends", "rewrites", "failed"]
_NO_DECISIONS = (Untrained.UNDELIVERED, Untrained.AUXILIARY)


@dataclass(frozen=True, slots=True)
class CallUse:
    """The use of one call in the trajectory.

    Attributes:
        index: of the call.
        kind: "root" (a new conversation), "extends" (its prompt appends to its parent's tokens), "rewrites" (it
            continues its parent, but the template rewrote the tokens) or "failed".
        num_sampled_tokens: sampled for it.
        turn: the number of the trained turn; None if it is not trained on.
        untrained: the reason if it is not; None if it is.
    """

    index: int
    kind: CallKind
    num_sampled_tokens: int
    turn: int | None = None
    untrained: Untrained | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CaptureBuild:
    """Everything that a `Trajectory` takes from the gateway.

    Attributes:
        segments, turns: as in `Trajectory`; no turn is scored.
        messages: the conversations that led to the turns, each message once, in the order in which the calls began. The
            last of the assistant's are the turns, as in every trajectory: what the model said elsewhere, or an agent
            says that it said, is a user's "(earlier) ..." behind the first turn. What an app never showed the model
            (its last observation) is not among them.
        turn_calls: the index of the call of each turn.
        decision_turns: of each call that may be a decision of the task (its answer was delivered, and it is not beside
            the task), the number of the turn; None if it has none, because others are trained on and it is not.
        uses: of every call, in order.
    """

    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    turn_calls: tuple[int, ...]
    decision_turns: tuple[int | None, ...]
    uses: tuple[CallUse, ...]

    @property
    def num_sampled_tokens(self) -> int:
        """Return the tokens sampled in the session."""
        return sum(use.num_sampled_tokens for use in self.uses)

    @property
    def num_trained_tokens(self) -> int:
        """Return the sampled tokens that are trained on."""
        return sum(use.num_sampled_tokens for use in self.uses if use.turn is not None)

    @property
    def trained_fraction(self) -> float:
        """Return the share of sampled tokens that are trained on; 0 if none was sampled."""
        return self.num_trained_tokens / self.num_sampled_tokens if self.num_sampled_tokens else 0.0

    @property
    def counts(self) -> Mapping[str, int]:
        """Count calls by use: "trained", and the values of `Untrained`."""
        counts: dict[str, int] = {}
        for use in self.uses:
            name = "trained" if use.untrained is None else use.untrained.value
            counts[name] = counts.get(name, 0) + 1
        return counts


def build_trajectory_parts(capture: Capture) -> CaptureBuild:
    """Return segments, turns and messages of a session.

    Turns are numbered in the order in which their calls began, and segments stand in the order of their first turns.
    """
    untrained_reasons = untrained_calls(capture.calls)
    calls = {call.index: call for call in capture.calls}
    decisions = _decisions(calls, untrained_reasons)
    # Masked turns only if nothing is trained on: the episode was played, and its return counts in its group.
    masked_calls = frozenset() if any(index not in untrained_reasons for index in calls) else frozenset(decisions)
    turn_calls = tuple(index for index in calls if index not in untrained_reasons or index in masked_calls)
    numbers = {index: turn for turn, index in enumerate(turn_calls)}
    paths = sorted(_owned_paths(calls, numbers), key=lambda path: min(numbers[index] for index in path.owned))
    segments: list[Segment] = []
    turns: dict[int, Turn] = {}
    for path in paths:
        segment, its_turns = _segment_of(path, calls, numbers, number=len(segments), masked=masked_calls)
        segments.append(segment)
        turns |= {turn.index: turn for turn in its_turns}
    return CaptureBuild(
        segments=tuple(segments),
        turns=tuple(turns[turn] for turn in range(len(turn_calls))),
        messages=_messages(calls, turn_calls),
        turn_calls=turn_calls,
        decision_turns=tuple(numbers.get(index) for index in decisions),
        uses=_uses(capture, numbers, untrained_reasons),
    )


def _decisions(calls: Mapping[int, CapturedCall], reasons: Mapping[int, Untrained]) -> tuple[int, ...]:
    # A conversation went on from it, so its answer arrived, whatever was noted.
    parents = {call.parent for call in calls.values()}
    return tuple(
        index
        for index, call in calls.items()
        if reasons.get(index) not in _NO_DECISIONS and (call.is_delivered or index in parents)
    )


@dataclass(frozen=True, slots=True)
class _Path:
    calls: tuple[int, ...]
    owned: frozenset[int]


def _owned_paths(calls: Mapping[int, CapturedCall], trained_calls: Iterable[int]) -> list[_Path]:
    trained_calls = set(trained_calls)
    inner = {index for end in trained_calls for index in _line(calls[end], calls)[:-1]}
    paths, taken_calls = [], set[int]()
    for leaf in sorted(trained_calls - inner):
        # In order, so a completion is trained on in the first path that holds it.
        line = _line(calls[leaf], calls)
        owned_calls = frozenset(index for index in line if index in trained_calls and index not in taken_calls)
        taken_calls |= owned_calls
        paths.append(_Path(tuple(line), owned_calls))
    return paths


def _line(call: CapturedCall, calls: Mapping[int, CapturedCall]) -> list[int]:
    line = [call.index]
    while call.appends and call.parent is not None:
        call = calls[call.parent]
        line.append(call.index)
    return line[::-1]


def _segment_of(
    path: _Path,
    calls: Mapping[int, CapturedCall],
    turn_numbers: Mapping[int, int],
    *,
    number: int,
    masked: Collection[int],
) -> tuple[Segment, list[Turn]]:
    segment = OpenSegment()
    turns: list[Turn] = []
    observed_end = 0  # up to where the tokens belong to an earlier turn
    for call in (calls[index] for index in path.calls):
        segment.append_context(call.context_ids)
        completion = call.completion
        # Context here: it is trained on in an earlier path, or not at all.
        if call.index not in path.owned:
            segment.append_context(completion.token_ids)
            continue
        start, turn = len(segment), turn_numbers[call.index]
        if call.index in masked:
            segment.append_context(completion.token_ids)
        else:
            segment.append_action(completion, turn=turn)
        turns.append(
            Turn(
                index=turn,
                segment=number,
                observation_span=(observed_end, start),
                action_span=(start, len(segment)),
                finish_reason=completion.finish_reason,
                parse=call.parse,
            )
        )
        observed_end = len(segment)
    return segment.close(), turns


def _messages(calls: Mapping[int, CapturedCall], turn_calls: Sequence[int]) -> tuple[Message, ...]:
    needed_indices: set[int] = set()
    for index in turn_calls:
        at: int | None = index
        while at is not None and at not in needed_indices:
            needed_indices.add(at)
            at = calls[at].parent
    messages: list[Message] = []
    has_begun = False
    # The last messages of the assistant's have to be the turns, so others after the first turn become a user's.
    turns = set(turn_calls)
    for call in (call for index, call in calls.items() if index in needed_indices):
        is_turn = call.index in turns
        call_messages = [*call.new_messages, *([] if is_turn else [call.answer])]
        messages += map(_as_context, call_messages) if has_begun else call_messages
        has_begun = has_begun or is_turn
        messages += [call.answer] if is_turn else []
    return tuple(messages)


def _as_context(message: Message) -> Message:
    if message.role != "assistant":
        return message
    calls = [f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})" for call in message.tool_calls]
    return Message("user", "\n".join(["(earlier) " + message.content, *calls]))


def _uses(capture: Capture, turn_numbers: Mapping[int, int], reasons: Mapping[int, Untrained]) -> tuple[CallUse, ...]:
    uses = [
        CallUse(
            failed_call.index,
            "failed",
            0,
            None,
            Untrained.NOT_AWAITED if failed_call.kind == "open" else Untrained.FAILED,
        )
        for failed_call in capture.failed
    ]
    for call in capture.calls:
        kind: CallKind = "root" if call.parent is None else "extends" if call.appends else "rewrites"
        why = reasons.get(call.index)
        turn = turn_numbers[call.index] if why is None else None
        uses.append(CallUse(call.index, kind, call.num_sampled_tokens, turn, why))
    return tuple(sorted(uses, key=lambda use: use.index))


def untrained_calls(calls: Sequence[CapturedCall]) -> dict[int, Untrained]:
    """Return the reason of each call that is not trained on, by index; `calls` are in the order of their beginnings."""
    reasons = {call.index: call.untrained for call in calls if call.untrained is not None}
    silent = [call for call in calls if call.untrained is None and call.is_trained is None]
    parents = {call.parent for call in calls}
    for call in silent:
        # Rule 3: lost, and asked for by no retry.
        if not call.is_delivered and call.index not in parents:
            reasons[call.index] = Untrained.UNDELIVERED
    auxiliary = _auxiliary(calls, reasons)
    for call in silent:
        if call.index in auxiliary:
            reasons.setdefault(call.index, Untrained.AUXILIARY)
    return reasons


def _auxiliary(calls: Sequence[CapturedCall], reasons: Mapping[int, Untrained]) -> set[int]:
    by_index = {call.index: call for call in calls}
    trees: dict[int, list[CapturedCall]] = {}
    for call in calls:
        root = call
        while root.parent is not None:
            root = by_index[root.parent]
        if reasons.get(call.index) is not Untrained.UNDELIVERED:
            trees.setdefault(root.index, []).append(call)
    # Several single calls under one system message are an agent that shows its model only the present state.
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
    """Return the system message of a conversation; None if it has none."""
    first = root.new_messages[0]  # of a conversation that continues none, whose prompt is not empty
    return first.content if first.role == "system" else None
