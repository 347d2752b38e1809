"""Compare the tokens that an episode accumulated with a fresh rendering of its messages.

The tokens are right by construction, because the model read them. A difference means that a chat server, which renders
every prompt from messages, would show the model something else. `check_drift` finds any difference and is a
measurement; `check_context` finds only faults and may be a gate, as in `gspo-gym env check --model`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from gspo_gym.chat.renderer import Renderer
from gspo_gym.types import Message

_NUM_AROUND = 12  # tokens shown on each side of a difference


@dataclass(frozen=True, slots=True)
class DriftReport:
    """Difference of accumulated tokens from a fresh rendering.

    Attributes:
        position: index of the first token that differs, or None.
        same_text: both decode to the same text, so only the tokenisation differs.
        expected, actual: text around the difference in the fresh rendering and in the accumulated tokens, or "".
    """

    position: int | None
    same_text: bool
    expected: str = ""
    actual: str = ""

    @property
    def matches(self) -> bool:
        return self.position is None

    def __str__(self) -> str:
        if self.matches:
            return "no drift"
        kind = "the same text in other tokens" if self.same_text else "another text"
        return (
            f"{kind} from token {self.position}: the template says {self.expected!r}, the episode has {self.actual!r}"
        )


def check_drift(renderer: Renderer, tokens: Sequence[int], messages: Sequence[Message]) -> DriftReport:
    """Compare the tokens of an episode's last segment with a fresh rendering of all its messages.

    `tokens` are the segment's ids, up to and including the last answer (closed or cut off) or the last prompt;
    `messages` end with that answer or with the last observation. Raises a TemplateError where the template cannot
    render these messages.
    """
    actual = [int(token) for token in tokens]
    if messages and messages[-1].role == "assistant":
        expected = renderer.start(messages[:-1]) + renderer.action_ids(messages[-1])
        # Stop tokens are not compared: any of them closes an answer, and a cut-off answer has none.
        actual, expected = (
            ids[:-1] if ids[-1:] and ids[-1] in renderer.stop_token_ids else ids for ids in (actual, expected)
        )
    else:
        expected = renderer.start(messages)
    if actual == expected:
        return DriftReport(None, same_text=True)
    pairs = zip(actual, expected, strict=False)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(actual), len(expected)))
    around = slice(max(0, position - _NUM_AROUND), position + _NUM_AROUND)
    return DriftReport(
        position,
        same_text=renderer.decode(actual) == renderer.decode(expected),
        expected=renderer.decode(expected[around]),
        actual=renderer.decode(actual[around]),
    )


def check_context(
    renderer: Renderer, prompt: Sequence[int], is_sampled: Sequence[bool], messages: Sequence[Message]
) -> DriftReport:
    """Compare everything that was *not* sampled in a prompt with a fresh rendering of its messages.

    The pieces before, between and after the answers must be in the rendering in order, with exactly one answer in each
    gap. Raises a TemplateError where the template cannot render these messages.

    Args:
        prompt: the ids that the model was given, from the start of the segment.
        is_sampled: which of them the model sampled.
        messages: the conversation in the prompt, ending with the message to be answered.
    """
    actual = [int(token) for token in prompt]
    expected = renderer.start(messages)
    said: list[int] = []
    start = done = 0  # everything before is matched in `actual` and `expected`
    for is_answer, flags in itertools.groupby(is_sampled):
        stop = start + len(list(flags))
        piece = actual[start:stop]
        if is_answer:  # which may be spelt differently: white space in JSON, blank edges, a word in other pieces
            said = piece
        else:
            at = _position(expected, piece, done, is_first=start == 0, is_last=stop == len(actual))
            # As many stop tokens in the gap as in the answer: else a whole turn could hide in it.
            if at is None or _num_stops(renderer, expected[done:at]) != _num_stops(renderer, said):
                shown = expected[max(0, done - _NUM_AROUND) : done + len(piece) + _NUM_AROUND]
                return DriftReport(start, False, expected=renderer.decode(shown), actual=renderer.decode(piece))
            done = at + len(piece)
        start = stop
    if done < len(expected):
        rest = renderer.decode(expected[done:])
        return DriftReport(len(actual), False, expected=rest, actual="")
    return DriftReport(None, same_text=True)


def _position(expected: list[int], piece: list[int], done: int, *, is_first: bool, is_last: bool) -> int | None:
    if is_first or is_last:  # the only place where it can be
        places = [0 if is_first else len(expected) - len(piece)]
    else:
        places = [i for i in range(done, len(expected)) if expected[i] == piece[0]]
    return next((i for i in places if i >= done and expected[i : i + len(piece)] == piece), None)


def _num_stops(renderer: Renderer, token_ids: Sequence[int]) -> int:
    return sum(token in renderer.stop_token_ids for token in token_ids)
