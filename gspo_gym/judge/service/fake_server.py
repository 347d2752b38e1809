"""Fake judging model: an OpenAI-compatible server with verdicts by a rule, for tests and rehearsals without cost.

It reads the prompt of `prompt.py` as an honest judge would, by the fences with the nonce, and scores every criterion by
a rule. The default one, `score_by_words`:

    the words in double quotes in a criterion's description are looked for in what the policy wrote in the judged part
    (a turn, or the whole episode), in any case. The score is the share of them that are found: on a binary scale 1 for
    all of them, else 0; between the ends of a custom scale; on a count scale, how often they are found.

Its token counts are lengths in bytes divided by four. `gspo-gym judge fake` serves it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fastapi
from fastapi.responses import JSONResponse

from gspo_gym.base.http import read_json
from gspo_gym.judge.model.prompt import EVENT_HEAD, OUTCOME_HEAD, OUTCOME_PART, verdict_key

MODEL = "fake-judge"

Json = dict[str, Any]

_NONCE = re.compile(r"begins with (`+) ([0-9a-f]{20})")
_BY_POLICY = re.compile(r"turn (\d+): policy")
_QUOTED = re.compile(r'"([^"]+)"')
_RANGE = re.compile(r"a number from (\S+) to (\S+)")


@dataclass(frozen=True, slots=True)
class AskedCriterion:
    """A criterion as the prompt names it; `score` is the kind of its score."""

    id: str
    score: str
    description: str


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """The content of a prompt as an honest reader takes it.

    Attributes:
        parts: the criteria of every part, "turn_1", ... and "outcome".
        pieces: the label and the text of every piece of the episode.
    """

    nonce: str
    parts: Mapping[str, Sequence[AskedCriterion]]
    pieces: Sequence[tuple[str, str]]

    def said_in(self, part: str) -> str:
        """Return what the policy wrote in a part."""
        wanted = None if part == OUTCOME_PART else int(part.removeprefix("turn_"))
        found = [(_BY_POLICY.match(label), text) for label, text in self.pieces]
        return "\n".join(text for match, text in found if match and wanted in (None, int(match[1])))


Rule = Callable[[AskedCriterion, str], float]  # a criterion and what the policy wrote in the part -> the score
Answer = Callable[[Sequence[Mapping[str, str]]], str]  # the messages of a request -> the text of the answer


def read_prompt(messages: Sequence[Mapping[str, str]]) -> ReadPrompt:
    """Read a prompt by its fences; a ValueError if it is not one of `prompt.py`."""
    rules, data = messages[0]["content"], messages[-1]["content"]
    found = _NONCE.search(rules)
    if found is None:
        raise ValueError("expected a prompt of this project's judge, found no nonce in it")
    fence = f"{found[1]} {found[2]}"
    pieces: list[tuple[str, str]] = []
    label, lines = None, list[str]()
    for line in data.split("\n"):
        if line == f"{fence} end" and label is not None:
            pieces.append((label, "\n".join(lines)))
            label, lines = None, []
        elif label is None and line.startswith(f"{fence} "):
            label = line.removeprefix(f"{fence} ")
        elif label is not None:
            lines.append(line)
    return ReadPrompt(found[2], _read_parts(rules), pieces)


def score_by_words(criterion: AskedCriterion, text: str) -> float:
    """Score by the module's rule; a criterion without quoted words gets the lowest score."""
    words = [word.casefold() for word in _QUOTED.findall(criterion.description)]
    text = text.casefold()
    if criterion.score.startswith("a whole number"):
        return float(sum(text.count(word) for word in words))
    share = sum(word in text for word in words) / len(words) if words else 0.0
    if criterion.score == "0 or 1":
        return float(share >= 1)
    ends = _RANGE.match(criterion.score)
    low, high = (float(ends[1]), float(ends[2])) if ends else (0.0, 1.0)
    return low + (high - low) * share


def honest_verdict(prompt: ReadPrompt, rule: Rule = score_by_words) -> str:
    """Return the verdict by the rule, as JSON."""
    parts: Json = {
        part: {c.id: {"reason": "by rule", "score": _number(rule(c, prompt.said_in(part)))} for c in criteria}
        for part, criteria in prompt.parts.items()
    }
    return json.dumps({verdict_key(prompt.nonce): {**parts, "summary": "scored by a rule, not by a model"}})


def create_fake_judge_app(rule: Rule = score_by_words, *, answer: Answer | None = None) -> fastapi.FastAPI:
    """Return the server as an ASGI application, with /v1/models and /v1/chat/completions.

    `answer` replaces the whole answer, for judges that misbehave; `rule` is then not used.
    """
    app = fastapi.FastAPI(title="A fake judge that follows a rule")

    @app.get("/health")
    async def health() -> Json:
        return {"status": "healthy"}

    @app.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "gspo-gym"}]}

    @app.post("/v1/chat/completions")
    async def complete(request: fastapi.Request) -> Any:
        try:
            messages = read_json(await request.body())["messages"]
            text = honest_verdict(read_prompt(messages), rule) if answer is None else answer(messages)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            message = f"this fake answers only prompts of this project's judge: {error}"
            return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, 400)
        return completion(text, messages)

    return app


def completion(text: str, messages: Sequence[Mapping[str, str]]) -> Json:
    """Return a chat completion with that text, in the form of the API."""
    num_read = sum(_num_tokens(message["content"]) for message in messages)
    message = {"role": "assistant", "content": text, "refusal": None}
    num_written = _num_tokens(text)
    usage = {"prompt_tokens": num_read, "completion_tokens": num_written, "total_tokens": num_read + num_written}
    return {
        "id": "chatcmpl-fake",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": usage,
    }


def _read_parts(rules: str) -> dict[str, list[AskedCriterion]]:
    parts: dict[str, list[AskedCriterion]] = {}
    current: list[AskedCriterion] | None = None
    for line in rules.split("\n"):
        if line.startswith(EVENT_HEAD):
            current = []
            names = line.removeprefix(EVENT_HEAD).split(",")
            parts.update({name.strip(): current for name in names})
        elif line.startswith(OUTCOME_HEAD):
            current = parts[OUTCOME_PART] = []
        elif not line.startswith("{"):
            current = None
        elif current is not None:
            current.append(AskedCriterion(**json.loads(line)))
    return parts


def _number(score: float) -> int | float:  # as a model writes a count
    return int(score) if score.is_integer() else score


def _num_tokens(text: str) -> int:
    return -(-len(text.encode()) // 4)
