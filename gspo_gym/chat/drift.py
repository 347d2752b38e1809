"""Does what an episode accumulated still say what the template would say about its messages?

A measurement, not a gate: the tokens of an episode are right by construction, because the model read them. A difference
means that a deployed chat server, which renders every prompt from messages, would show the model something else. The
usual reason is the model's own spelling (white space in its JSON, blank edges that a template trims, a word in other
pieces); anything else is a fault of the renderer or of the environment's messages.
"""

from __future__ import annotations

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
