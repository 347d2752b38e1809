"""Judge an episode with a chat model behind any OpenAI-compatible endpoint.

The episode becomes questions, each question one verdict (`prompt.py`), each verdict reviews. The order of criteria and
the request's seed follow from the episode's content, and equal episodes are asked equal questions.

In mode "group" one question is about all episodes of a group (as RULER of OpenPipe's ART): what all of them begin with
is shown once, episodes of the same content are shown once and get the same score, and their order follows from the
contents, so that it differs between groups. All episodes of the group ask it, the first is answered by the model, the
others by the cache.

Whether an endpoint holds answers to a JSON schema and takes a seed and a temperature is
found out by asking: a field that it refuses, and accepts a request without, is not sent again. Answers are read with
the same strictness either way.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gspo_gym.base.http import HttpClient, RefusedError
from gspo_gym.base.messages import RefusedFields, refused_fields, without
from gspo_gym.base.retries import AttemptError, Sleep
from gspo_gym.errors import ServiceError
from gspo_gym.judge.asking import Asking, Clock, Json, JudgeBudget, JudgementCache, digest_of
from gspo_gym.judge.base import (
    BY_RULE,
    CriterionScore,
    JudgeCost,
    JudgeDeniedError,
    JudgeError,
    Judgement,
    JudgeRequest,
    Review,
    Rubrics,
    all_or_none,
    review_of,
)
from gspo_gym.judge.model.prompt import (
    COMPARISON,
    NONCE_DIGITS,
    OUTCOME_PART,
    PROMPT_VERSION,
    Question,
    Verdict,
    VerdictError,
    build_messages,
    episode_part,
    parse_verdict,
    turn_part,
    verdict_schema,
)
from gspo_gym.judge.model.transcript import Transcript, compacted, read_transcript, suspicions
from gspo_gym.judge.rubric import Criterion, Rubric
from gspo_gym.judge.settings import ModelJudgeSettings
from gspo_gym.seeding import child_seed, generator
from gspo_gym.types import Trajectory

_MAX_PARTS_OF_A_CALL = 24  # turns in one call: longer answers are cut off, and models lose the thread


class ModelJudge:
    """Scores episodes by asking a model. Use it within one event loop, and close it.

    A cache of answers and a budget may be shared by judges; without them every question is asked, at any cost.

    Raises:
        ConfigError: the key's variable is not set. MissingExtraError: httpx is not installed.
    """

    def __init__(
        self,
        settings: ModelJudgeSettings,
        *,
        cache: JudgementCache | None = None,
        budget: JudgeBudget | None = None,
        clock: Clock = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.settings = settings
        self._compares = settings.reading.mode == "group"
        # The episodes of a group share the answer by a cache, so there must be one.
        self._own_cache = JudgementCache() if cache is None and self._compares else None
        self._cache = cache or self._own_cache
        self._last_comparison: tuple[tuple[Trajectory, ...], Rubric, Comparison] | None = None
        self._model = ChatJudgeModel(settings, budget=budget, clock=clock, sleep=sleep)
        self._secret = secrets.token_bytes(32)  # of the nonces, which no text inside an episode may know
        # Episodes are read a few at a time: preparing thousands at once would use up the time of the first requests.
        self._open_episodes = asyncio.Semaphore(2 * settings.asking.max_concurrency)

    @property
    def name(self) -> str:
        return self.settings.name

    async def judge(self, request: JudgeRequest) -> Judgement:
        if self._compares and request.group:  # without waiting: those of a group ask at once, so that one call answers
            return await self._judge_in_group(request)
        async with self._open_episodes:
            return await self._judge(request)

    async def close(self) -> None:
        """Close the connections; a cache that was handed over belongs to the caller."""
        if self._own_cache is not None:
            await self._own_cache.close()
        await self._model.close()

    async def _judge(self, request: JudgeRequest) -> Judgement:
        transcript = read_transcript(request.trajectory)
        questions = plan(transcript, request.rubrics, self.settings)
        answers = await all_or_none([self._answer(question, request.rubrics) for question in questions])
        scores: dict[str, Mapping[str, CriterionScore]] = {}
        summaries: dict[str, str] = {}
        for verdict, _ in answers:
            scores |= verdict.parts
            # A call has one summary: it goes to the outcome, which it is about, or to the turns if they are alone.
            about = [OUTCOME_PART] if OUTCOME_PART in verdict.parts else verdict.parts
            summaries |= dict.fromkeys(about, verdict.summary)

        def review(part: str, rubric: Rubric) -> Review:
            return review_of(rubric, scores.get(part), summaries.get(part, "" if part in scores else BY_RULE))

        event, outcome = request.rubrics.event, request.rubrics.outcome
        return Judgement(
            judge=self.name,
            event_reviews=tuple(review(turn_part(turn), event) for turn in range(transcript.num_turns))
            if event
            else (),
            outcome_review=None if outcome is None else review(OUTCOME_PART, outcome),
            flags=suspicions(request.trajectory),
            cuts=_cuts_of(questions),
            cost=sum((cost for _, cost in answers), JudgeCost()),
        )

    async def _judge_in_group(self, request: JudgeRequest) -> Judgement:
        outcome = request.rubrics.outcome
        if outcome is None or request.rubrics.event is not None:
            raise JudgeError('mode "group" compares whole episodes: expected a rubric of the outcome alone')
        if len(request.group) == 1:
            raise JudgeError(
                'no other episode of its group to compare it with; judge.options.mode "auto" judges it alone'
            )
        comparison = self._comparison(request.group, outcome)
        part = comparison.part_by_id[request.trajectory.trajectory_id]
        flags, scale = suspicions(request.trajectory), Rubric((COMPARISON,))
        if part is None:
            return Judgement(self.name, outcome_review=review_of(scale, None, BY_RULE), flags=flags)
        verdict, cost = await self._answer(comparison.question, request.rubrics)
        review = review_of(scale, verdict.parts[part], verdict.summary)
        return Judgement(self.name, outcome_review=review, flags=flags, cuts=comparison.cuts_of(part), cost=cost)

    def _comparison(self, group: tuple[Trajectory, ...], rubric: Rubric) -> Comparison:
        # The episodes of a group ask one after the other, and each would read all of them.
        if (last := self._last_comparison) is not None and last[0] == group and last[1] is rubric:
            return last[2]
        whole = {t.trajectory_id: read_transcript(t) for t in group}
        comparison = plan_comparison(whole, rubric, self.settings)
        self._last_comparison = (group, rubric, comparison)
        return comparison

    async def _answer(self, question: Question, rubrics: Rubrics) -> tuple[Verdict, JudgeCost]:
        key = self._key(question, rubrics)
        seed = child_seed(self.settings.seed, "judge", key)
        shuffled_question = _shuffle(question, seed) if self.settings.shuffles_criteria else question
        costs: list[JudgeCost] = []  # of what is asked now; an answer from the cache costs nothing

        def nonce_of(num_answers: int) -> str:
            return hmac.new(self._secret, f"{key}/{num_answers}".encode(), hashlib.sha256).hexdigest()[:NONCE_DIGITS]

        async def ask() -> Json:
            verdict, cost = await self._model.ask(shuffled_question, nonce_of=nonce_of, seed=seed)
            costs.append(cost)
            return _verdict_to_json(verdict)

        answer = await (ask() if self._cache is None else self._cache.get_or_ask(key, ask))
        return _verdict_from_json(answer, question), sum(costs, JudgeCost())

    def _key(self, question: Question, rubrics: Rubrics) -> str:
        # All that the answer depends on; the episode's place in its group is not part of that.
        transcript = question.transcript
        compared = {"compared": [_content(episode) for episode in question.episodes]} if question.episodes else {}
        return digest_of(
            {
                "prompt_version": PROMPT_VERSION,
                "model": self.settings.cache_identity,
                "rubrics": {
                    name: rubric.to_dict() if rubric else None
                    for name, rubric in (("event", rubrics.event), ("outcome", rubrics.outcome))
                },
                "parts": list(question.parts),
                "transcript": _content(transcript),
                "num_turns": transcript.num_turns,
                **compared,
            }
        )


def plan(whole: Transcript, rubrics: Rubrics, settings: ModelJudgeSettings) -> list[Question]:
    """Return the questions about an episode; none about turns, or an episode, without content.

    One call asks about everything ("episode"), or one for each turn and one for the outcome ("turn"). In mode "group",
    for an episode that is judged alone, it is as in "auto".
    """
    nonempty_turns = tuple(turn for turn in range(whole.num_turns) if not whole.is_empty_turn(turn))
    if not nonempty_turns:  # it gets the lowest scores by rule
        return []
    event = rubrics.event.criteria if rubrics.event else ()
    outcome = rubrics.outcome.criteria if rubrics.outcome else ()
    goals = {
        name: rubric.goal_text for name, rubric in (("turns", rubrics.event), ("outcome", rubrics.outcome)) if rubric
    }
    mode, limit = settings.reading.mode, settings.max_transcript_chars
    # "auto" asks once where no judged turn is then read in a shortened context.
    fits = whole.num_chars <= limit and len(nonempty_turns) <= _MAX_PARTS_OF_A_CALL
    if not event or mode == "episode" or (mode != "turn" and fits):
        turns = nonempty_turns if event else ()
        focus = range(whole.num_turns) if outcome else turns
        return [Question(compacted(whole, focus, limit), turns, event, outcome, goals)] if turns or outcome else []
    questions = [
        Question(compacted(whole.until(turn), {turn}, limit), (turn,), event, (), {"turns": goals["turns"]})
        for turn in nonempty_turns
    ]
    if outcome:
        shortened_transcript = compacted(whole, range(whole.num_turns), limit)
        questions.append(Question(shortened_transcript, (), (), outcome, {"outcome": goals["outcome"]}))
    return questions


def _content(transcript: Transcript) -> Json:
    return [[piece.writer, piece.turn, piece.text, piece.note] for piece in transcript.pieces]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The question about the episodes of a group.

    Attributes:
        part_by_id: by trajectory id, the part of the verdict about it; None for an episode without content.
    """

    question: Question
    part_by_id: Mapping[str, str | None]

    def cuts_of(self, part: str) -> tuple[str, ...]:
        """Return what was not shown of the episode of this part."""
        own = next(e for place, e in enumerate(self.question.episodes) if episode_part(place) == part)
        return (*self.question.transcript.cuts, *own.cuts)


def plan_comparison(whole: Mapping[str, Transcript], rubric: Rubric, settings: ModelJudgeSettings) -> Comparison:
    """Return the question about a group's transcripts, which `whole` has by trajectory id.

    An episode without content is in no question, and gets the lowest score by rule.
    """
    digest_by_id = {
        id_: digest_of(_content(transcript))
        for id_, transcript in whole.items()
        if not all(transcript.is_empty_turn(turn) for turn in range(transcript.num_turns))
    }
    digests = list(dict.fromkeys(digest_by_id.values()))
    if settings.shuffles_criteria:
        digests.sort()  # else the order would depend on who is which member
        seed = child_seed(settings.seed, "judge", digest_of([settings.sample, digests]))
        digests = [digests[int(index)] for index in generator(seed, "episodes").permutation(len(digests))]
    transcript_of = {digest: whole[id_] for id_, digest in digest_by_id.items()}
    shared, rests = _without_beginning([transcript_of[digest] for digest in digests])
    # An equal share for each, so that a long episode takes nothing from the others.
    shared = _compacted(shared, settings.max_transcript_chars // 2)
    share = (settings.max_transcript_chars - shared.num_chars) // max(len(rests), 1)
    episodes = tuple(_compacted(rest, share) for rest in rests)
    question = Question(shared, outcome=rubric.criteria, goals={"outcome": rubric.goal_text}, episodes=episodes)
    part_of = {digest: episode_part(place) for place, digest in enumerate(digests)}
    return Comparison(question, {id_: part_of.get(digest_by_id.get(id_, "")) for id_ in whole})


def _without_beginning(transcripts: Sequence[Transcript]) -> tuple[Transcript, list[Transcript]]:
    """Return the pieces with which all transcripts begin, and each transcript without them."""
    columns = zip(*(transcript.pieces for transcript in transcripts), strict=False)
    num_shared = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
    rests = [replace(transcript, pieces=transcript.pieces[num_shared:]) for transcript in transcripts]
    shared = transcripts[0].pieces[:num_shared] if transcripts else ()
    return Transcript(shared, max((transcript.num_turns for transcript in transcripts), default=0)), rests


def _compacted(transcript: Transcript, limit: int) -> Transcript:
    return compacted(transcript, range(transcript.num_turns), limit) if transcript.pieces else transcript


def _cuts_of(questions: Sequence[Question]) -> tuple[str, ...]:
    if len(questions) == 1:
        return questions[0].transcript.cuts
    return tuple(f"{', '.join(question.parts)}: {cut}" for question in questions for cut in question.transcript.cuts)


def _shuffle(question: Question, seed: int) -> Question:

    def shuffle(criteria: Sequence[Criterion], name: str) -> tuple[Criterion, ...]:
        order = generator(seed, "criteria", name).permutation(len(criteria))
        return tuple(criteria[int(index)] for index in order)

    return replace(question, event=shuffle(question.event, "event"), outcome=shuffle(question.outcome, "outcome"))


def _verdict_to_json(verdict: Verdict) -> Json:
    parts = {
        name: {id_: [score.score, score.reason] for id_, score in scores.items()}
        for name, scores in verdict.parts.items()
    }
    return {"parts": parts, "summary": verdict.summary}


def _verdict_from_json(value: Json, question: Question) -> Verdict:
    # The form of a cached verdict is not checked: its digest is right, and its key is this question's.
    parts: Mapping[str, Any] = value["parts"]
    assert set(parts) == set(question.parts), "a key stands for one question"
    return Verdict(
        {name: {id_: CriterionScore(*pair) for id_, pair in scores.items()} for name, scores in parts.items()},
        value["summary"],
    )


_SCHEMA = "response_format"
_NO_NONCE = "0" * NONCE_DIGITS
_ABOUT_THE_REQUEST = (400, 404, 415, 422, 501)
_DENIED = (402, 404)  # no money; no such model or address
_SEED_LIMIT = 2**31  # what servers of C's int accept
_TOKENS_OF_A_MESSAGE = 64  # what templates put around one, at most


class JudgeAnswerError(AttemptError):
    """The answer is no chat completion with a text."""


class ChatJudgeModel:
    """Sends a question as a chat completion and reads the verdict. See `ModelJudge` for the arguments."""

    def __init__(self, settings: ModelJudgeSettings, *, budget: JudgeBudget | None, clock: Clock, sleep: Sleep) -> None:
        self._name, self._settings = settings.name, settings.model
        model = settings.model
        client = HttpClient(model.url, api_key=model.read_key(), timeout_seconds=settings.asking.timeout_seconds)
        self._asking = Asking(client, settings.asking, budget=budget, clock=clock, sleep=sleep)
        self._fields = RefusedFields(settings.name)

    async def ask(self, question: Question, *, nonce_of: Callable[[int], str], seed: int) -> tuple[Verdict, JudgeCost]:
        """Return the verdict and the cost of all attempts.

        Raises:
            JudgeDownError, JudgeBudgetError, JudgeDeniedError: see `Asking.ask`; the last also for missing payment
                (402) or an unknown model (404). JudgeError: it refused, or gave no verdict.
        """

        def is_about(error: RefusedError, refused_names: frozenset[str]) -> frozenset[str]:
            return self._is_about(error, self._request(question, _NO_NONCE, seed, refused_names))

        try:
            return await self._fields.ask(
                lambda refused_names: self._ask(question, nonce_of, seed, refused_names), is_about, (RefusedError,)
            )
        except JudgeError:
            raise
        except ServiceError as error:
            is_denied = isinstance(error, RefusedError) and error.status in _DENIED
            kind = JudgeDeniedError if is_denied else JudgeError
            raise kind(f"{self._name}: {error}") from error

    async def close(self) -> None:
        await self._asking.close()

    async def _ask(
        self, question: Question, nonce_of: Callable[[int], str], seed: int, refused_names: Collection[str]
    ) -> tuple[Verdict, JudgeCost]:
        nonce = ""

        def body(num_answers: int) -> Mapping[str, Any]:
            nonlocal nonce
            # After an unreadable answer another nonce and seed.
            nonce = nonce_of(num_answers)
            return self._request(question, nonce, child_seed(seed, "answer", num_answers), refused_names)

        def read(answer: Any) -> Verdict:
            return parse_verdict(_text_of(answer), nonce=nonce, parts=question.parts)

        return await self._asking.ask("/chat/completions", body, read, self._cost_of, most=self._most(question))

    def _request(self, question: Question, nonce: str, seed: int, refused_names: Collection[str]) -> dict[str, Any]:
        settings = self._settings
        schema = {"name": "verdict", "strict": True, "schema": verdict_schema(nonce, question.parts)}
        request: dict[str, Any] = {
            "model": settings.model,
            "messages": build_messages(question, nonce),
            settings.max_tokens_field: settings.max_output_tokens,
            "seed": seed % _SEED_LIMIT,
            _SCHEMA: {"type": "json_schema", "json_schema": schema},
        }
        request["temperature"] = settings.temperature or 0.0
        return without(request, refused_names)

    def _is_about(self, error: RefusedError, request: Mapping[str, Any]) -> frozenset[str]:
        """Return the request's fields that a refusal may be about."""
        if error.status not in _ABOUT_THE_REQUEST:
            return frozenset()
        # Without a temperature of the user's, an endpoint that refuses it is asked without.
        optional = {"seed", "temperature"} if self._settings.temperature is None else {"seed"}
        refused_names = refused_fields(error.answer, request, optional=optional)
        # A refusal that names no field is taken to be about the schema.
        return refused_names or frozenset({_SCHEMA})

    def _most(self, question: Question) -> JudgeCost:
        messages = build_messages(question, _NO_NONCE)
        num_bytes = sum(len(message["content"].encode()) for message in messages)  # no token is shorter than a byte
        tokens = num_bytes + _TOKENS_OF_A_MESSAGE * (len(messages) + 1)
        return self._settings.prices.cost_of(tokens, self._settings.max_output_tokens)

    def _cost_of(self, answer: Any) -> JudgeCost | None:
        usage = answer.get("usage") if isinstance(answer, Mapping) else None
        if not isinstance(usage, Mapping):
            return None
        num_in, num_out = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if type(num_in) is int and type(num_out) is int and num_in >= 0 and num_out >= 0:
            return self._settings.prices.cost_of(num_in, num_out)
        return None


def _text_of(answer: Any) -> str:
    """Return the model's text; a JudgeAnswerError if it refuses, was cut off, or the answer has another form."""
    choices = answer.get("choices") if isinstance(answer, Mapping) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, Mapping) else None
    if not isinstance(choice, Mapping) or not isinstance(message, Mapping):
        raise JudgeAnswerError(f"expected a chat completion with a message, got {answer!r:.120}", kind="answer")
    if message.get("refusal") or choice.get("finish_reason") == "content_filter":
        raise JudgeAnswerError(f"the judge refused: {message.get('refusal')!r:.120}", kind="refusal")
    if choice.get("finish_reason") == "length":
        raise JudgeAnswerError("the verdict was cut off; raise max_output_tokens", kind="length")
    text = message.get("content")
    if not isinstance(text, str):
        raise VerdictError(f"expected a text, got {text!r:.120}")
    return text
