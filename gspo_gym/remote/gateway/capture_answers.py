"""From sampled tokens to the answer that they say: stop strings, parsing, and why it ended, in OpenAI's words."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from gspo_gym.chat.parsing import ParseFailure
from gspo_gym.chat.renderer import Renderer
from gspo_gym.errors import EngineError, RecordError
from gspo_gym.remote.gateway.capture import WireFinish
from gspo_gym.rollout.segments import SampledTokens
from gspo_gym.types import Completion, FinishReason, Message, ParseStatus


@dataclass(frozen=True, slots=True)
class Answer:
    """What a completion says; fields as in `CapturedCall`."""

    completion: Completion
    message: Message
    parse: ParseStatus
    error: str | None
    finish_reason: WireFinish


def require_possible(completion: Completion, *, max_tokens: int, vocab_size: int, renderer: Renderer) -> None:
    """Check that what an engine claims to have sampled can have been.

    Raises:
        EngineError: it cannot.
    """
    try:
        sampled = SampledTokens.checked(completion.token_ids, completion.logprobs, completion.weight_version)
        sampled.require_possible(max_tokens=max_tokens, vocab_size=vocab_size, stop_token_ids=renderer.stop_token_ids)
    except RecordError as error:
        raise EngineError(f"the engine's answer cannot be right: {error}") from error


def read_chat(completion: Completion, *, renderer: Renderer, opening: Sequence[int], stops: Sequence[str]) -> Answer:
    """The message that a completion behind `opening` says; its whole text is the content where it cannot be parsed."""
    completion, text, is_cut = _cut_at_stops(completion, stops, renderer, opening)
    is_stopped = is_cut or int(completion.token_ids[-1]) in renderer.stop_token_ids
    parsed = renderer.parse(text, is_truncated=not is_stopped)
    finish: WireFinish = "stop" if is_stopped else "length"
    if isinstance(parsed, ParseFailure):
        return Answer(completion, Message("assistant", text), parsed.status, parsed.error, finish)
    finish = "tool_calls" if parsed.tool_calls else finish
    return Answer(completion, parsed, ParseStatus.OK, None, finish)


def read_text(completion: Completion, *, renderer: Renderer, stops: Sequence[str]) -> Answer:
    """The plain text of a completion."""
    completion, text, is_cut = _cut_at_stops(completion, stops, renderer, ())
    is_stopped = is_cut or int(completion.token_ids[-1]) in renderer.stop_token_ids
    return Answer(completion, Message("assistant", text), ParseStatus.OK, None, "stop" if is_stopped else "length")


def _cut_at_stops(
    completion: Completion, stops: Sequence[str], renderer: Renderer, opening: Sequence[int]
) -> tuple[Completion, str, bool]:
    """The completion up to the token that completes the first stop string, the text before it, and if there was one.

    What remains is an exact sample of a policy that is stopped there: whether it is depends on its own tokens only. Its
    finish reason is STOP, whatever the engine said of the tokens that were cut off.
    """
    ids = completion.token_ids.tolist()
    whole = renderer.decode([*opening, *ids])
    if not _places(renderer.decode(ids), stops):
        return completion, whole, False
    # of the shortest beginning that holds a stop string, as the whole does
    count = bisect_left(range(len(ids)), True, key=lambda count: bool(_places(renderer.decode(ids[:count]), stops)))
    said = renderer.decode(ids[:count])
    lost = len(said) - min(_places(said, stops))
    cut = Completion(
        token_ids=completion.token_ids[:count],
        logprobs=completion.logprobs[:count],
        finish_reason=FinishReason.STOP,
        weight_version=completion.weight_version[:count],
    )
    return cut, renderer.decode([*opening, *ids[:count]])[:-lost], True


def _places(text: str, stops: Sequence[str]) -> list[int]:
    return [place for stop in stops if stop and (place := text.find(stop)) >= 0]
