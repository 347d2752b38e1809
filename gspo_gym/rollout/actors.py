"""Actors: an engine or a scripted policy chooses the tokens of a turn; `adapter.py` records them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gspo_gym.chat.renderer import Renderer
from gspo_gym.engine.base import Engine, SamplingParams
from gspo_gym.env.core import PolicyFactory, ScriptedPolicy
from gspo_gym.env.playing import spoken_by
from gspo_gym.errors import UnknownNameError, UsageError, nearest_name, shortened
from gspo_gym.seeding import child_seed, generator
from gspo_gym.types import Completion, FinishReason, Int32Array, Message, Sampling


@dataclass(frozen=True, slots=True, eq=False)
class ActRequest:
    """One turn to be played.

    Attributes:
        session_id: the episode's attempt; the same for all its turns and for nothing else.
        turn_index: 0 for the first action.
        prompt_token_ids: [L] int32, all that the policy reads.
        max_tokens: most tokens to answer with, the stop token included.
        messages: the conversation that the prompt renders.
        sampling_seed: of the episode; each turn derives another from it.
        env: the environment being played (Any: authors need not subclass anything).
    """

    session_id: str
    turn_index: int
    prompt_token_ids: Int32Array
    max_tokens: int
    messages: tuple[Message, ...]
    sampling_seed: int
    renderer: Renderer
    env: Any  # hand-written policies may look at hidden state


class Actor(Protocol):
    """Plays turns of many episodes at once."""

    async def __call__(self, request: ActRequest) -> Completion:
        """Return the tokens of this turn; any exception makes the episode an engine failure."""
        ...

    async def end_session(self, session_id: str) -> None:
        """Forget what was kept for an episode, however it ended; unknown sessions are fine."""
        ...


class EngineActor:
    """Actor that samples from an engine. Turn k of an episode uses the seed child_seed(sampling_seed, "turn", k).

    A turn that may have fewer tokens than `min_tokens` (the context ends) may end with any of them.
    """

    def __init__(self, engine: Engine, sampling: Sampling = Sampling()) -> None:  # noqa: B008  # frozen
        self._engine = engine
        self._sampling = sampling

    async def __call__(self, request: ActRequest) -> Completion:
        params = SamplingParams.of(
            self._sampling,
            max_tokens=request.max_tokens,
            stop_token_ids=request.renderer.stop_token_ids,
            seed=child_seed(request.sampling_seed, "turn", request.turn_index),
        )
        return await self._engine.generate(request.prompt_token_ids, params, session_id=request.session_id)

    async def end_session(self, session_id: str) -> None:
        await self._engine.end_session(session_id)


class ScriptedActor:
    """Actor of a scripted policy, as if a model had sampled its messages: for demonstrations and baselines.

    Its logprobs are 0 and its weight versions -1: imitate such episodes, never reinforce them. `make_policy` gives the
    player of one episode from the environment and a generator.
    """

    def __init__(self, make_policy: PolicyFactory) -> None:
        self._make_policy = make_policy
        self._policies: dict[str, ScriptedPolicy] = {}

    async def __call__(self, request: ActRequest) -> Completion:
        policy = self._policies.get(request.session_id)
        if policy is None:
            policy = self._make_policy(request.env, generator(request.sampling_seed, "policy"))
            self._policies[request.session_id] = policy
        reply = await spoken_by(policy, request.messages)
        message = Message("assistant", reply) if isinstance(reply, str) else reply
        token_ids = request.renderer.action_ids(message)
        if len(token_ids) > request.max_tokens:  # a demonstration that is cut off would teach to stop in the middle
            raise UsageError(
                f"the scripted policy's message has {len(token_ids)} tokens, but turn {request.turn_index} may have "
                f"{request.max_tokens}: {shortened(message.content)!r}; raise max_output_tokens or max_model_len "
                "(a demonstration that is cut off would teach to stop in the middle)"
            )
        return scripted_completion(token_ids)

    async def end_session(self, session_id: str) -> None:
        self._policies.pop(session_id, None)


def scripted_completion(token_ids: Sequence[int]) -> Completion:
    """Return a completion that no model sampled: logprobs 0, weight version -1, ended by its last token."""
    count = len(token_ids)
    return Completion(
        token_ids=np.asarray(token_ids, dtype=np.int32),
        logprobs=np.zeros(count, dtype=np.float32),
        finish_reason=FinishReason.STOP,
        weight_version=np.full(count, -1, dtype=np.int32),
    )


def policy_of(env_type: Any, name: str) -> PolicyFactory:
    """Return the hand-written policy `name` of an environment (class or instance), or raise an UnknownNameError."""
    policies = getattr(env_type, "policies", {})
    if name not in policies:
        owner = getattr(env_type, "__name__", type(env_type).__name__)
        raise UnknownNameError(f"{owner} has no scripted policy {name!r}; {nearest_name(name, policies)}")
    policy: PolicyFactory = policies[name]
    return policy
