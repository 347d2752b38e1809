"""Audit the tokens of live play: the prompts that a player is given, and the tokens that are trained on.

Players take live turns as in a rollout: a small model itself, or hand-written players in the tokens that a larger model
would have to sample. Every prompt is compared with the template's rendering of all messages from nothing. Answers may
be spelt in another way; any other difference is drift, and a failure.

The tokens are right by construction, because the model read them. A difference means that a chat server, which renders
every prompt from messages, would show the model something else. `check_drift` finds any difference and is a
measurement; `check_context` finds only faults and may be a gate, as in `gspo-gym env check --model`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

from gspo_gym.base.loops import run_to_end
from gspo_gym.base.tables import ShownAsText, table
from gspo_gym.chat.renderer import Renderer, RendererCache
from gspo_gym.config.build.threads import compute_in, computing_elsewhere
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.env.core import PolicyFactory
from gspo_gym.env.playing import spoken_by, tool_calling_policy
from gspo_gym.env.registry import make, resolve
from gspo_gym.errors import TemplateError
from gspo_gym.policy.bases import TINY_PREFIX
from gspo_gym.policy.load import load_policy, load_tokenizer
from gspo_gym.rollout.actors import Actor, ActRequest, EngineActor, ScriptedActor
from gspo_gym.rollout.episode import EpisodeRequest, run_episode
from gspo_gym.rollout.limits import EpisodeLimits
from gspo_gym.run.report.progress import mask_picture
from gspo_gym.types import Completion, Message, Segment, Task, Trajectory

Seam = Literal["start", "extends", "new segment"]
Rendering = Literal["same", "respelt", "drift"]

_TURN_FIELDS = ("seed", "turn", "seam", "reason", "rendering", "difference")
_ALOUD = ", reasoning aloud"
_SHOWN = 5  # failures that are printed
_REASONING = "Let me see."
_MAX_SAMPLED = 16  # of a model that answers at random: enough to be cut off, and to end by itself at times
_MAX_MODEL_LEN = 1_000_000  # of hand-written players, who read nothing
_NUM_AROUND = 12  # tokens shown on each side of a difference


@dataclass(frozen=True, slots=True)
class TurnAudit:
    """One prompt that a player was given.

    Attributes:
        player, seed, turn: of the prompt.
        seam: how it continues the previous turn; "new segment" if the template rewrites earlier messages.
        reason: why there is a new segment; "" otherwise.
        rendering: "same" as a fresh one, token for token; "respelt": but for the answers' spelling; else "drift".
        difference: "" if there is none.
    """

    player: str
    seed: int
    turn: int
    seam: Seam
    reason: str
    rendering: Rendering
    difference: str

    @property
    def where(self) -> str:
        return f"{self.player}, seed {self.seed}, turn {self.turn}"


@dataclass(frozen=True, slots=True)
class PlayerAudit:
    """A player's turns, and the numbers of its trained and untrained tokens over all segments."""

    player: str
    turns: tuple[TurnAudit, ...]
    num_trained: int
    num_untrained: int

    def count(self, what: Seam | Rendering) -> int:
        """Return how many turns have this seam or rendering."""
        return sum(what in (turn.seam, turn.rendering) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class TokenAudit(ShownAsText):
    """Findings of `audit_tokens`.

    Attributes:
        env_id, model: the audited pair.
        players: in the order in which they played.
        failures: drift, templates that cannot be rendered, episodes that failed.
        notes: players that this template cannot express.
        sample_player, sample: an episode's last segment as (text, whether it is trained on), and its player.
    """

    env_id: str
    model: str
    players: tuple[PlayerAudit, ...]
    failures: tuple[str, ...]
    notes: tuple[str, ...]
    sample_player: str
    sample: tuple[tuple[str, bool], ...]

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def broken_seams(self) -> dict[str, tuple[int, str]]:
        """Return how many turns started a new segment, and the first of them, by reason."""
        turns = [turn for player in self.players for turn in player.turns if turn.reason]
        counts = Counter(turn.reason for turn in turns)
        return {turn.reason: (counts[turn.reason], turn.where) for turn in reversed(turns)}

    def as_json(self) -> dict[str, Any]:
        """Return the audit for machines (Any: JSON)."""
        return {
            "environment": self.env_id,
            "model": self.model,
            "passed": self.passed,
            "players": [_player_as_json(player) for player in self.players],
            "new_segments": [
                {"reason": reason, "count": count, "first": first}
                for reason, (count, first) in self.broken_seams.items()
            ],
            "failures": list(self.failures),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        head = f"tokens of {self.env_id} with {self.model}: {'passed' if self.passed else 'FAILED'}"
        heads = ("", "turns", "extend", "new", "same", "respelt", "drift", "trained", "masked")
        rows = []
        for audit in self.players:
            counts = [audit.count(kind) for kind in ("extends", "new segment", "same", "respelt", "drift")]
            rows.append((audit.player, *map(str, (len(audit.turns), *counts, audit.num_trained, audit.num_untrained))))
        lines = [head, table(heads, rows)]
        for reason, (count, first) in self.broken_seams.items():
            lines.append(f"  new segments, {count} of them, first at {first}: {reason}")
        lines += [f"  FAIL {failure}" for failure in self.failures[:_SHOWN]]
        if len(self.failures) > _SHOWN:
            lines.append(f"  FAIL ... and {len(self.failures) - _SHOWN} more like these")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def audit_tokens(env: str, model: str, *, num_turns: int, env_config: Mapping[str, Any] | None = None) -> TokenAudit:
    """Play at least `num_turns` live turns with each player and compare the prompts.

    A tiny model samples its answers. Of any other only the tokenizer and template are loaded, and hand-written players
    answer: the environment's, arbitrary actions, and the reference again with reasoning before its answers.

    Raises:
        UnknownNameError: no such environment or model.
        TemplateError: the tokenizer's chat template cannot be rendered exactly.
    """
    env_id, config = resolve(env), dict(env_config or {})
    probe = make(env_id, **config)
    # Several environments keep their policies behind wrappers, hence `unwrapped`.
    bare = getattr(probe, "unwrapped", probe)
    policies: Mapping[str, PolicyFactory] = getattr(bare, "policies", {})
    schemas = tuple(getattr(bare, "tool_schemas", ()))
    probe.close()
    return run_to_end(_audit(_Table(env_id, config, model, num_turns), policies, schemas))


@dataclass(slots=True)
class _Table:
    """State of an audit: the environment's players, and the findings so far."""

    env_id: str
    config: dict[str, Any]  # Any: JSON
    model: str
    num_turns: int
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    segments: dict[str, Segment] = field(default_factory=dict)  # the last of each player's first episode, as a sample

    @property
    def limits(self) -> EpisodeLimits:
        return EpisodeLimits(
            max_turns=self.num_turns, max_output_tokens=_MAX_MODEL_LEN - 1, max_model_len=_MAX_MODEL_LEN
        )


async def _audit(
    table: _Table, policies: Mapping[str, PolicyFactory], schemas: tuple[Mapping[str, Any], ...]
) -> TokenAudit:
    audits: list[PlayerAudit] = []
    # Larger models would take minutes: hand-written players need only the template.
    if table.model.startswith(TINY_PREFIX):
        with computing_elsewhere("cpu") as num_threads:
            policy = load_policy(table.model)
            renderers = RendererCache(policy.tokenizer)
            longest = policy.model.config.max_position_embeddings
            limits = table.limits.model_copy(update={"max_output_tokens": _MAX_SAMPLED, "max_model_len": longest})
            engine = LocalEngine(policy.model, max_model_len=longest)
            try:
                await compute_in(engine, policy.model, num_threads)
                audits.append(await _play(table, table.model, EngineActor(engine), renderers, limits))
            finally:
                await engine.close()
    else:
        renderers = RendererCache(load_tokenizer(table.model))
    with contextlib.suppress(TemplateError):  # each player fails by it
        table.notes += [notice for notice in (renderers.for_tools(schemas).notice,) if notice is not None]
    players = {**policies, "arbitrary actions": tool_calling_policy}
    for name, factory in players.items():
        audits.append(await _play(table, name, ScriptedActor(factory), renderers, table.limits))
    # Reasoning is what templates drop or move, so one player thinks aloud.
    name = "reference" if "reference" in players else "arbitrary actions"
    thinking = ScriptedActor(_thinking(players[name]))
    audits.append(await _play(table, name + _ALOUD, thinking, renderers, table.limits))
    sample_player = "reference" if "reference" in table.segments else next(iter(table.segments), "")
    segment = table.segments.get(sample_player)
    return TokenAudit(
        env_id=table.env_id,
        model=table.model,
        players=tuple(audits),
        failures=tuple(table.failures),
        notes=tuple(table.notes),
        sample_player=sample_player,
        sample=() if segment is None else mask_picture(segment, renderers.tokenizer.decode),
    )


def _thinking(factory: PolicyFactory) -> PolicyFactory:

    def policy(env: Any, rng: Any) -> Any:
        player = factory(env, rng)

        async def play(messages: Sequence[Message]) -> Message:
            content = await spoken_by(player, messages)
            message = Message("assistant", content) if isinstance(content, str) else content
            return replace(message, reasoning_content=_REASONING)

        return play

    return policy


class _Witness:
    """Actor that lets another actor play and notes the prompts."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self.requests: list[ActRequest] = []

    async def __call__(self, request: ActRequest) -> Completion:
        self.requests.append(request)
        return await self._actor(request)

    async def end_session(self, session_id: str) -> None:
        await self._actor.end_session(session_id)


async def _play(
    table: _Table, player: str, actor: Actor, renderers: RendererCache, limits: EpisodeLimits
) -> PlayerAudit:
    turns: list[TurnAudit] = []
    num_trained = num_tokens = seed = 0
    while len(turns) < table.num_turns:
        witness = _Witness(actor)
        request = EpisodeRequest(f"{player}/{seed}", Task(table.env_id, seed), sampling_seed=seed)
        trajectory = await run_episode(
            request, make_env=partial(_make, table.config), act=witness, renderers=renderers, limits=limits
        )
        turns += _audit_turns(table, player, trajectory, witness.requests)
        num_trained += sum(int(segment.action_mask.sum()) for segment in trajectory.segments)
        num_tokens += sum(map(len, trajectory.segments))
        if trajectory.segments:
            table.segments.setdefault(player, trajectory.segments[-1])
        if trajectory.error is not None or not trajectory.turns:
            text = f"{player}, seed {seed}: {trajectory.error or 'the episode had no turn'}"
            # A template without a place for reasoning is no fault of the environment.
            is_inexpressible = player.endswith(_ALOUD) and TemplateError.__name__ in text
            (table.notes if is_inexpressible else table.failures).append(text)
            break
        seed += 1
    return PlayerAudit(player, tuple(turns), num_trained, num_tokens - num_trained)


def _make(config: Mapping[str, Any], task: Task) -> Any:
    return make(task.env_id, **config)


def _audit_turns(table: _Table, player: str, trajectory: Trajectory, requests: Sequence[ActRequest]) -> list[TurnAudit]:
    audits = []
    # An episode that failed has prompts without a finished turn.
    for turn, request in zip(trajectory.turns, requests, strict=False):
        segment = trajectory.segments[turn.segment]
        length = turn.action_span[0]
        prompt = request.prompt_token_ids.tolist()
        where = f"{player}, seed {trajectory.task.seed}, turn {turn.index}"
        if prompt != segment.token_ids[:length].tolist():
            table.failures.append(f"{where}: the player was given other tokens than the record says")
        seam: Seam = "start" if turn.index == 0 else "extends"
        reason = ""
        if turn.index > 0 and turn.segment != trajectory.turns[turn.index - 1].segment:
            seam = "new segment"
            reason = _why(request, trajectory.segments[turn.segment - 1].token_ids.tolist())
        rendering, difference = _compare(request.renderer, prompt, segment.action_mask[:length].tolist(), request)
        if rendering == "drift":
            table.failures.append(f"{where}: {difference}")
        audits.append(TurnAudit(player, trajectory.task.seed, turn.index, seam, reason, rendering, difference))
    return audits


def _compare(
    renderer: Renderer, prompt: list[int], is_sampled: list[bool], request: ActRequest
) -> tuple[Rendering, str]:
    drift = check_drift(renderer, prompt, request.messages)
    if drift.matches:
        return "same", ""
    # The template may spell the model's own answer in other tokens: only the rest must be the same.
    context = check_context(renderer, prompt, is_sampled, request.messages)
    return ("respelt", str(drift)) if context.matches else ("drift", str(context))


def _why(request: ActRequest, before: list[int]) -> str:
    # Judged by what the template wrote in place of the earlier tokens.
    renderer, after = request.renderer, request.prompt_token_ids.tolist()
    text = renderer.decode(after)
    thoughts = [message.reasoning_content for message in request.messages if message.reasoning_content]
    if any(reasoning not in text for reasoning in thoughts):
        return "the template drops the reasoning of earlier turns"
    pairs = zip(before, after, strict=False)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(before), len(after)))
    around = slice(max(0, position - 4), position + 8)  # a few tokens before, for people to find the place
    was, became = (renderer.decode(ids[around]) for ids in (before, after))
    return f"the template rewrites {was!r} to {became!r}"


def _player_as_json(audit: PlayerAudit) -> dict[str, Any]:
    return {
        "player": audit.player,
        "num_turns": len(audit.turns),
        "num_extend": audit.count("extends"),
        "num_new_segments": audit.count("new segment"),
        **{f"num_{rendering}": audit.count(rendering) for rendering in get_args(Rendering)},
        "num_trained_tokens": audit.num_trained,
        "num_untrained_tokens": audit.num_untrained,
        "turns": [{name: getattr(turn, name) for name in _TURN_FIELDS} for turn in audit.turns],
    }


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
        fresh_ids = renderer.start(messages[:-1]) + renderer.action_ids(messages[-1])
        # Stop tokens are not compared: any of them closes an answer, and a cut-off answer has none.
        actual, fresh_ids = (
            ids[:-1] if ids[-1:] and ids[-1] in renderer.stop_token_ids else ids for ids in (actual, fresh_ids)
        )
    else:
        fresh_ids = renderer.start(messages)
    if actual == fresh_ids:
        return DriftReport(None, same_text=True)
    pairs = zip(actual, fresh_ids, strict=False)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(actual), len(fresh_ids)))
    around = slice(max(0, position - _NUM_AROUND), position + _NUM_AROUND)
    return DriftReport(
        position,
        same_text=renderer.decode(actual) == renderer.decode(fresh_ids),
        expected=renderer.decode(fresh_ids[around]),
        actual=renderer.decode(actual[around]),
    )


def check_context(
    renderer: Renderer, prompt: Sequence[int], is_sampled: Sequence[bool], messages: Sequence[Message]
) -> DriftReport:
    """Compare the tokens of a prompt that were *not* sampled with a fresh rendering of its messages.

    The pieces before, between and after the answers must be in the rendering in order, with exactly one answer in each
    gap. Raises a TemplateError where the template cannot render these messages.

    Args:
        prompt: the ids that the model was given, from the start of the segment.
        is_sampled: which of them the model sampled.
        messages: the conversation in the prompt, ending with the message to be answered.
    """
    actual = [int(token) for token in prompt]
    fresh_ids = renderer.start(messages)
    answer: list[int] = []
    start = end = 0  # everything before is matched in `actual` and `fresh_ids`
    for is_answer, flags in itertools.groupby(is_sampled):
        stop = start + len(list(flags))
        piece = actual[start:stop]
        if is_answer:  # which may be spelt differently: white space in JSON, blank edges, a word in other pieces
            answer = piece
        else:
            at = _position(fresh_ids, piece, end, is_first=start == 0, is_last=stop == len(actual))
            # As many stop tokens in the gap as in the answer: else a whole turn could hide in it.
            if at is None or _num_stops(renderer, fresh_ids[end:at]) != _num_stops(renderer, answer):
                around = fresh_ids[max(0, end - _NUM_AROUND) : end + len(piece) + _NUM_AROUND]
                return DriftReport(start, False, expected=renderer.decode(around), actual=renderer.decode(piece))
            end = at + len(piece)
        start = stop
    if end < len(fresh_ids):
        text_after = renderer.decode(fresh_ids[end:])
        return DriftReport(len(actual), False, expected=text_after, actual="")
    return DriftReport(None, same_text=True)


def _position(fresh_ids: list[int], piece: list[int], end: int, *, is_first: bool, is_last: bool) -> int | None:
    if is_first or is_last:  # the only place where it can be
        places = [0 if is_first else len(fresh_ids) - len(piece)]
    else:
        places = [i for i in range(end, len(fresh_ids)) if fresh_ids[i] == piece[0]]
    return next((i for i in places if i >= end and fresh_ids[i : i + len(piece)] == piece), None)


def _num_stops(renderer: Renderer, token_ids: Sequence[int]) -> int:
    return sum(token in renderer.stop_token_ids for token in token_ids)
