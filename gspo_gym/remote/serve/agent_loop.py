"""The agent of a served environment: play episodes against the model that a rollout names, by the `openai` package.

The conversation is that of `rollout.episode.run_episode`, message for message (the system prompt's place, unreadable
text, the limit on turns, the end of an episode): what our gateway captures then has the tokens of an episode played in
the trainer's process. A `PlayedRollout` is filled as the rollout goes on, to keep the beginning of one that is stopped.

The model's URL comes from a request and was checked before (`urls.py`); the checked address is called. The sampling
settings of the rollout's policy are sent and no others: the trainer expects samples of those.
"""

from __future__ import annotations

import importlib.util
import json
import math
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from gspo_gym.base.messages import message_from_wire, message_to_wire
from gspo_gym.chat.renderer import with_system_prompt
from gspo_gym.env.blame import (
    LIMIT_TERM,
    Action,
    Retrial,
    answer_to,
    are_other_actions_quick,
    floor_of,
    is_the_actions_doing,
)
from gspo_gym.env.session import EnvSession
from gspo_gym.errors import ContextOverflowError, GymError, MissingExtraError, RecordError, ServiceError
from gspo_gym.remote.apps.contracts import EXTENSION
from gspo_gym.remote.apps.urls import PinnedUrl
from gspo_gym.types import SAMPLING_NAMES, Message, Outcome, StepResult

_CHAT = "/chat/completions"
_LIMITS = ("max_tokens", "max_completion_tokens", "seed", "stop")
_OPENAI_SAMPLING = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "logit_bias")
_OTHER_SAMPLING = tuple(name for name in SAMPLING_NAMES if name not in _OPENAI_SAMPLING)  # which OpenAI has no name for
_OVERFLOW_CODE = "context_length_exceeded"  # OpenAI's, which our gateway and vLLM's router use, too
_MAX_SHOWN = 300  # characters of a foreign error that ours repeats
_MAX_REPLAY_SECONDS = 600.0


class InferenceError(ServiceError):
    """The model gave no answer, or an unreadable one."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of the model.

    Attributes:
        message: its message, with the raw text if that could not be read as an action.
        error: the reason for that, in words for the model; None if it could be read.
        parse: the gateway's name for it ("ok", "bad_tool_call", ...).
        finish_reason: of the API. usage: the server's token counts. seconds: until it was there.
        logprobs: of the sampled tokens, if they were asked for and given.
    """

    message: Message
    error: str | None = None
    parse: str = "ok"
    finish_reason: str = "stop"
    usage: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    logprobs: tuple[float, ...] | None = None


def require_openai() -> None:
    """Raise if the openai package is missing, at the server's start and not in its first rollout.

    Raises:
        MissingExtraError: the openai package is not installed.
    """
    if importlib.util.find_spec("openai") is None:
        raise MissingExtraError("playing rollouts needs: pip install 'gspo-gym[serve]'")


def split_inference_url(url: str) -> tuple[str, dict[str, str]]:
    """Return the base URL for the `openai` package, and the query that each request keeps.

    >>> split_inference_url("http://gw/t/ID/v1/chat/completions?cid=ID")
    ('http://gw/t/ID/v1', {'cid': 'ID'})
    >>> split_inference_url("http://gw/t/ID?cid=ID"), split_inference_url("http://gw/v1/")
    (('http://gw/t/ID/v1', {'cid': 'ID'}), ('http://gw/v1', {}))
    """
    parts = urlsplit(url)
    path = parts.path.rstrip("/").removesuffix(_CHAT)
    if not path.endswith("/v1"):
        path += "/v1"
    return urlunsplit((parts.scheme, parts.netloc, path, "", "")), dict(parse_qsl(parts.query))


def policy_arguments(policy: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `chat.completions.create` that a rollout's `policy.config` decides (Any: JSON).

    >>> policy_arguments({"model": "m", "temperature": 1.0, "top_k": 5, "inference_url": "http://gw"})
    {'temperature': 1.0, 'extra_body': {'top_k': 5}, 'model': 'm'}
    """
    sampling = {name: value for name, value in policy.items() if value is not None}
    arguments: dict[str, Any] = {name: sampling[name] for name in (*_OPENAI_SAMPLING, *_LIMITS) if name in sampling}
    if extra_options := {name: sampling[name] for name in _OTHER_SAMPLING if name in sampling}:
        arguments["extra_body"] = extra_options
    return {**arguments, "model": str(policy.get("model") or "policy")}


def openai_client(
    url: PinnedUrl, *, api_key: str | None = None, timeout_seconds: float = 600.0, max_retries: int = 2
) -> Any:
    """Return an `openai.AsyncOpenAI` that calls a checked URL and no other (Any: the package is an extra).

    Raises:
        MissingExtraError: the openai package is not installed.
    """
    require_openai()
    import openai

    base_url, query = split_inference_url(url.url)
    return openai.AsyncOpenAI(
        base_url=base_url,
        api_key=api_key or "none",
        default_query=query,
        timeout=timeout_seconds,
        max_retries=max_retries,
        http_client=openai.DefaultAsyncHttpxClient(
            trust_env=False,
            follow_redirects=False,
            timeout=timeout_seconds,
            # False: nothing is verified because nothing is TLS; reading the authorities takes long.
            verify=ssl.create_default_context() if url.scheme == "https" else False,
            event_hooks={"request": [url.pin]},
        ),
    )


class InferenceClient:
    """Client of one endpoint for one rollout. Use it within one event loop, and close it.

    Args:
        url: checked.
        policy: JSON of the rollout's `policy.config`: `model` and how to sample.
        api_key: sent as a bearer; None sends a placeholder.
        with_logprobs: asks for those of the sampled tokens.
        timeout_seconds: for one answer. max_retries: of transport errors, 429 and 5xx, by the `openai` package.

    Raises:
        MissingExtraError: the openai package is not installed.
    """

    def __init__(
        self,
        url: PinnedUrl,
        policy: Mapping[str, Any],
        *,
        api_key: str | None = None,
        with_logprobs: bool = False,
        timeout_seconds: float = 600.0,
        max_retries: int = 2,
    ) -> None:
        self._where = f"{url.scheme}://{url.host}:{url.port}"  # without path and query, which open it
        self._fixed_arguments = policy_arguments(policy)
        if with_logprobs:
            self._fixed_arguments["logprobs"] = True
        self._is_ours = False  # whether the gateway answers, which knows what else a message holds
        self._client = openai_client(url, api_key=api_key, timeout_seconds=timeout_seconds, max_retries=max_retries)

    async def ask(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Reply:
        """Return the model's next message; `tools` are OpenAI function schemas.

        Raises:
            InferenceError: no answer, or an unreadable one.
            ContextOverflowError: the conversation no longer fits the model.
        """
        import openai

        request = {**self._fixed_arguments, "messages": [self._to_wire(message) for message in messages]}
        if tools:
            request["tools"] = list(tools)
        start = time.monotonic()
        try:
            answer = await self._client.chat.completions.create(**request)
        except openai.APIStatusError as error:
            raise self._failure(error.status_code, error.body, str(error)) from None
        except (openai.OpenAIError, json.JSONDecodeError) as error:
            raise InferenceError(f"{self._where}: {type(error).__name__}: {str(error)[:_MAX_SHOWN]}") from None
        return self._read(answer, seconds=time.monotonic() - start)

    async def close(self) -> None:
        await self._client.close()

    def _to_wire(self, message: Message) -> dict[str, Any]:
        wire = message_to_wire(message)
        # Other servers refuse the field, or show it to their model.
        if self._is_ours and message.reasoning_content is not None:
            wire["reasoning_content"] = message.reasoning_content
        return wire

    def _failure(self, status: int, body: object, text: str) -> Exception:
        if is_overflow(status, body, text):
            return ContextOverflowError(f"{self._where}: the conversation no longer fits the model")
        return InferenceError(f"{self._where}: status {status}: {text[:_MAX_SHOWN]}")

    def _read(self, answer: Any, *, seconds: float) -> Reply:  # Any: an endpoint may answer with anything
        try:
            wire = answer.model_dump(mode="json")
            choice = wire["choices"][0]
            message_data = choice["message"]
            usage = {name: n for name, n in (wire.get("usage") or {}).items() if isinstance(n, int)}
            extra = wire.get(EXTENSION)
            # Only our gateway answers with the extra field.
            self._is_ours = isinstance(extra, dict)
            return Reply(
                **_read_message(message_data, extra if isinstance(extra, dict) else {}, self._where),
                finish_reason=str(choice.get("finish_reason")),
                usage=usage,
                seconds=seconds,
                logprobs=_logprobs(choice),
            )
        except (AttributeError, LookupError, TypeError) as error:
            raise InferenceError(f"{self._where}: expected a chat completion, got {answer!r:.{_MAX_SHOWN}}") from error


def is_overflow(status: int, body: object, text: str) -> bool:
    """Return whether an endpoint's error says that the conversation no longer fits the model."""
    code = body.get("code") if isinstance(body, Mapping) else None
    return status == 400 and (code == _OVERFLOW_CODE or "maximum context length" in text)  # vLLM has no code for it


def _read_message(message_data: Mapping[str, Any], extra: Mapping[str, Any], where: str) -> dict[str, Any]:
    if extra.get("error"):
        text = Message("assistant", str(message_data.get("content") or ""))
        return {"message": text, "error": str(extra["error"]), "parse": str(extra.get("parse", "bad_tool_call"))}
    try:
        return {"message": message_from_wire({**message_data, "role": "assistant"}, where=where)}
    # The environment answers a text that is not an action, as it would in the trainer's process.
    except RecordError as error:  # an endpoint that passes on arguments that are no JSON
        if not all(_is_call(call) for call in message_data.get("tool_calls") or ()):
            raise InferenceError(str(error)) from error
        text = Message("assistant", str(message_data.get("content") or ""))
        reason = str(error).removeprefix(f"{where}: ")
        return {"message": text, "error": reason, "parse": "bad_tool_call"}


def _is_call(call: object) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _logprobs(choice: Mapping[str, Any]) -> tuple[float, ...] | None:
    content = (choice.get("logprobs") or {}).get("content")
    return None if content is None else tuple(float(token["logprob"]) for token in content)


class Ask(Protocol):
    """Asks the model for its next message."""

    async def __call__(self, messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...], /) -> Reply:
        """Return the model's next message.

        Raises:
            InferenceError: there is none. ContextOverflowError: the conversation no longer fits.
        """


@dataclass(frozen=True, slots=True)
class Plan:
    """What to play.

    Attributes:
        seed: of the task. options: JSON, of each reset.
        max_turns: decisions in all, over all episodes.
        system_prompt: put before the environment's first messages; None: none is.
        make_env: makes a fresh environment, to retry what failed.
        on_done: "terminate": one episode; "reset": the same task again while there are turns left.
    """

    seed: int
    max_turns: int
    make_env: Callable[[], Any]
    system_prompt: str | None = None
    on_done: Literal["reset", "terminate"] = "terminate"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """An answer of the model and the environment's answer to it.

    `seen` is what was new to the model: the environment's messages since its last answer.
    """

    seen: tuple[Message, ...]
    reply: Reply
    result: StepResult


@dataclass(slots=True)
class PlayedEpisode:
    """One episode so far. `outcome` None: it is still going on.

    `unanswered` is what was new to the model, and its answer, while the environment has not answered that.
    `action_seconds` is the environment's time for actions.
    """

    decisions: list[Decision] = field(default_factory=list)
    outcome: Outcome | None = None
    unanswered: tuple[tuple[Message, ...], Reply] | None = None
    action_seconds: float = 0.0

    @property
    def rewards(self) -> list[float]:
        """Return the rewards of the scored decisions."""
        return [decision.result.reward for decision in self.decisions if decision.result.reward is not None]

    @property
    def episode_return(self) -> float | None:
        """Return the sum of the rewards; None, and not 0, if no decision was scored."""
        return float(sum(self.rewards)) if self.rewards else None

    @property
    def success(self) -> bool | None:
        """Return the environment's last declaration of success."""
        declarations = [decision.result.success for decision in self.decisions if decision.result.success is not None]
        return declarations[-1] if declarations else None


@dataclass(slots=True)
class PlayedRollout:
    """Everything played for one request. `num_ops` counts answers of the model and steps of the environment.

    `session` is the environment's, once there is one.
    """

    episodes: list[PlayedEpisode] = field(default_factory=list)
    num_ops: int = 0
    session: EnvSession | None = None

    @property
    def num_decisions(self) -> int:
        """Return the number of decisions over all episodes."""
        return sum(len(episode.decisions) for episode in self.episodes)


class PlayError(GymError, RuntimeError):
    """The rollout cannot go on; `code` names the side that failed."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


async def play_rollout(played: PlayedRollout, *, session: EnvSession, ask: Ask, plan: Plan) -> None:
    """Play the plan and record it in `played`.

    Raises:
        PlayError: the environment or the model failed, or not even the first message fits the model.
    """
    played.session = session
    while played.num_decisions < plan.max_turns:
        episode = PlayedEpisode()
        played.episodes.append(episode)
        await _play_episode(episode, played, session=session, ask=ask, plan=plan)
        # "reset": the same task again while there are turns left.
        if plan.on_done == "terminate":
            return


async def end_if_actions_were_slow(played: PlayedRollout, plan: Plan, *, seconds: float) -> bool:
    """Return whether actions used up the time of a rollout, `seconds`; the open episode then ends at the floor.

    That is, more than half of it went into answering actions, and rule 5 of `env/blame.py` holds. Finding out takes up
    to a quarter of that time.
    """
    if not played.episodes or played.session is None:
        return False
    episode, session = played.episodes[-1], played.session
    num_actions = len(_actions_of(episode))
    # Actions that took less than half of the time did not use it up.
    if episode.outcome is not None or num_actions == 0 or episode.action_seconds <= seconds / 2:
        return False
    retrial = _retrial_of(plan, session, max_seconds=seconds / 8)  # to make it, and to play
    if not await are_other_actions_quick(num_actions, episode.action_seconds, retrial):
        return False
    _end_at_limit(episode, session)
    return True


async def _play_episode(
    episode: PlayedEpisode, rollout: PlayedRollout, *, session: EnvSession, ask: Ask, plan: Plan
) -> None:
    opening = (await _of_env("env_reset_failed", session.reset(plan.seed, plan.options or None))).messages
    new_messages = with_system_prompt(opening, plan.system_prompt)
    conversation = new_messages
    while True:
        reply = await _ask_model(ask, conversation, session.tool_schemas, is_first=not episode.decisions)
        if reply is None:
            episode.outcome = Outcome.CONTEXT_OVERFLOW
            return
        rollout.num_ops += 1
        # Kept before the step: if that fails, the model's answer is not lost.
        episode.unanswered = (new_messages, reply)
        try:
            result = await _time_answer(session, episode, _action_of(reply))
        except GymError as error:
            retrial = _retrial_of(plan, session, max_seconds=_MAX_REPLAY_SECONDS)
            # Another environment is asked: a broken one would fail for any action.
            if not await is_the_actions_doing(error, _actions_of(episode), retrial):
                raise PlayError("env_step_failed", str(error)) from error
            _end_at_limit(episode, session)
            rollout.num_ops += 1
            return
        rollout.num_ops += 1
        episode.unanswered = None
        episode.decisions.append(Decision(new_messages, reply, result))
        conversation += (reply.message, *result.messages)
        new_messages = result.messages
        if result.done:
            episode.outcome = Outcome.TERMINATED if result.terminated else Outcome.TRUNCATED
            return
        if rollout.num_decisions >= plan.max_turns:
            episode.outcome = Outcome.MAX_TURNS
            return


def _action_of(reply: Reply) -> Action:
    return reply.message if reply.error is None else reply.error


async def _time_answer(session: EnvSession, episode: PlayedEpisode, action: Action) -> StepResult:
    start = time.monotonic()
    try:
        result: StepResult = await answer_to(session, action)
    finally:
        episode.action_seconds += time.monotonic() - start
    return result


def _actions_of(episode: PlayedEpisode) -> list[Action]:
    replies = [decision.reply for decision in episode.decisions] + (
        [] if episode.unanswered is None else [episode.unanswered[1]]
    )
    return [_action_of(reply) for reply in replies]


def _retrial_of(plan: Plan, session: EnvSession, *, max_seconds: float) -> Retrial:
    return Retrial(
        plan.make_env,
        env_id=session.env_id,
        seed=plan.seed,
        options=plan.options or None,
        step_timeout_seconds=session.step_timeout_seconds,
        max_seconds=max_seconds,
    )


def _end_at_limit(episode: PlayedEpisode, session: EnvSession) -> None:
    episode_return = math.fsum(episode.rewards)
    floor = floor_of(session.env, episode_return, None)
    if episode.unanswered is not None:
        penalty = floor - episode_return
        result = StepResult((), reward=penalty, reward_terms={LIMIT_TERM: penalty}, terminated=True)
        episode.decisions.append(Decision(*episode.unanswered, result))
        episode.unanswered = None
    else:
        last = episode.decisions[-1]
        penalty = floor - (episode_return - (last.result.reward or 0.0))
        last_result = replace(
            last.result, reward=penalty, reward_terms={LIMIT_TERM: penalty}, terminated=True, events=()
        )
        episode.decisions[-1] = replace(last, result=last_result)
    episode.outcome = Outcome.ACTION_LIMIT


async def _ask_model(
    ask: Ask, conversation: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...], *, is_first: bool
) -> Reply | None:
    try:
        return await ask(conversation, tools)
    except ContextOverflowError as error:
        # Nothing was played: a return of 0 would be made up.
        if is_first:
            raise PlayError("no_steps_executed", f"the first message does not fit the model: {error}") from error
        return None
    except GymError as error:
        raise PlayError("policy_step_failed", str(error)) from error


async def _of_env(code: str, call: Any) -> StepResult:  # Any: a coroutine of EnvSession
    try:
        result: StepResult = await call
    except GymError as error:
        raise PlayError(code, str(error)) from error
    return result
