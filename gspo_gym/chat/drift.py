"""Does what an episode accumulated still say what the template would say about its messages?

A measurement, not a gate: the tokens of an episode are right by construction, because the model read them. A difference
means that a deployed chat server, which renders every prompt from messages, would show the model something else. The
usual reason is the model's own spelling (white space in its JSON, blank edges that a template trims, a word in other
pieces); anything else is a fault of the renderer or of the environment's messages. `check_drift` finds any difference,
`check_context` only such a fault, and that one may well be a gate: `gspo-gym env check --model` is.
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
    """How accumulated tokens compare with a fresh rendering.

    Attributes:
        position: index of the first token that differs, None if none does.
        same_text: both say the same text, so that a difference is one of tokenisation only.
        expected: text around the difference in the fresh rendering, "" if there is none.
        actual: the same for the accumulated tokens.
    """

    position: int | None
    same_text: bool
    expected: str = ""
    actual: str = ""

    @property
    def matches(self) -> bool:
        """Token for token the same."""
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

    Args:
        renderer: of the model that played.
        tokens: the segment's ids, up to and including the last answer (closed or cut off) or the last prompt.
        messages: the episode's messages, ending with that answer, or with the last observation.

    Raises:
        TemplateError: the template cannot render these messages.
    """
    actual = [int(token) for token in tokens]
    if messages and messages[-1].role == "assistant":
        expected = renderer.start(messages[:-1]) + renderer.action_ids(messages[-1])
        # Any stop token closes an answer, and an answer that was cut off has none.
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
    """Compare all that was *not* sampled in a prompt with a fresh rendering of its messages.

    The answers may be spelt in their own way; what stands before, between and behind them must be in the rendering, in
    order, with nothing but one answer in each gap.

    Args:
        renderer: of the model that played.
        prompt: the ids that the model was given, from the start of the segment.
        is_sampled: which of them it sampled itself.
        messages: the conversation that the prompt shows, ending with what is to be answered.

    Raises:
        TemplateError: the template cannot render these messages.
    """
    actual = [int(token) for token in prompt]
    expected = renderer.start(messages)
    said: list[int] = []
    start = done = 0  # how far `actual` and `expected` are accounted for
    for is_answer, flags in itertools.groupby(is_sampled):
        stop = start + len(list(flags))
        piece = actual[start:stop]
        if is_answer:
            said = piece
        else:
            at = _position(expected, piece, done, is_first=start == 0, is_last=stop == len(actual))
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
    """Where `piece` is in `expected`, not before `done`; the first and the last piece have their places."""
    if is_first or is_last:
        places = [0 if is_first else len(expected) - len(piece)]
    else:
        places = [i for i in range(done, len(expected)) if expected[i] == piece[0]]
    return next((i for i in places if i >= done and expected[i : i + len(piece)] == piece), None)


def _num_stops(renderer: Renderer, token_ids: Sequence[int]) -> int:
    return sum(token in renderer.stop_token_ids for token in token_ids)
