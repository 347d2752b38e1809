"""StepProtocol: a served environment of ours, played step by step over HTTP.

One session is one episode. Every request says which attempt or which step it is, so one whose answer was lost is sent
again and played once. The server is `gspo-gym env serve NAME`; messages, rewards, terms, events and flags come through
unchanged. A session that the server no longer has is an error, never a fresh one. Unlike `OpenEnv`, it needs no socket
that stays open, so it goes through proxies and load balancers that keep a client on one server.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from gymnasium.error import ResetNeeded

from gspo_gym.env.core import TextEnv
from gspo_gym.env.data.splits import next_seed
from gspo_gym.env.rewards import Reward
from gspo_gym.env.suites.step_protocol_http import AtCapacityError, StepServer, ToolsCache
from gspo_gym.env.workers.wire import message_to_json, step_result_from_json
from gspo_gym.errors import ContractError, EnvError
from gspo_gym.seeding import generator
from gspo_gym.types import Message, StepResult

# Module state on purpose: what a server says of itself is the same for every environment made of it.
_TOOLS = ToolsCache()
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.05, 2.0  # between tries to get a session

Step = tuple[Any, Any, bool, bool, dict[str, Any]]  # Any: an observation; a reward; info


class StepProtocolEnv(TextEnv):
    """An environment that a `gspo-gym env serve` server plays, one HTTP request a step.

    Args:
        url: of the server, http://127.0.0.1:8000.
        name: of the environment there.
        config: arguments of its constructor, as far as the server lets clients set them.
        api_key_env: the environment variable with the server's key; None sends none.
        timeout_seconds: for one answer; a step may take as long as the server allows, so keep it above that.
        max_attempts: of one request, where connections fail or proxies do; each is played once.
        capacity_timeout_seconds: how long a reset waits for a place in a full server. Below the rollout's
            `step_timeout_seconds`, or that is what ends the wait.

    Raises:
        ConfigError: the URL or the key.
        EnvError, EnvTimeoutError, ContractError: the server does not say what it serves.
        MissingExtraError: httpx is not installed.
    """

    isolation = "thread"  # async throughout: it runs in the event loop

    def __init__(
        self,
        *,
        url: str,
        name: str,
        config: Mapping[str, Any] | None = None,
        api_key_env: str | None = None,
        timeout_seconds: float = 120.0,
        max_attempts: int = 4,
        capacity_timeout_seconds: float = 30.0,
    ) -> None:
        self._server = StepServer(
            url, name, api_key_env=api_key_env, timeout_seconds=timeout_seconds, max_attempts=max_attempts
        )
        self._config = dict(config or {})
        self._tool_schemas = _TOOLS.of(self._server, self._config)
        self.takes_messages = bool(self._tool_schemas)
        self._capacity_timeout = capacity_timeout_seconds
        self._env_id: str | None = None  # of the session; None: no episode is being played
        self._num_steps = 0

    @property
    def tool_schemas(self) -> tuple[Mapping[str, Any], ...]:
        """As the served environment has them."""
        return self._tool_schemas

    async def reset(  # type: ignore[override]  # async, as TextEnv allows
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Sequence[Message], dict[str, Any]]:
        """Opens a session; without a seed, of a task drawn as `splits.next_seed` says."""
        super().reset(seed=seed)
        await self.close()
        seed = next_seed(self.np_random) if seed is None else seed
        # The attempt's id is the server's only proof that a second request is the first one again.
        request = {"attempt_id": uuid.uuid4().hex, "seed": seed, "config": self._config}
        answer = await self._opened({**request, "options": dict(options or {})}, seed)
        self._env_id, self._num_steps = str(answer["env_id"]), 0
        result = _result_of(answer, self._server.where("initialize"))
        return result.messages, dict(result.info)

    async def step(self, action: Message | str) -> Step:  # type: ignore[override]
        """One turn."""
        message = Message("assistant", action) if isinstance(action, str) else action
        return await self._play({"message": message_to_json(message)})

    async def invalid_action(self, error: str) -> Step:
        """One turn, whose text was no action: the served environment answers."""
        return await self._play({"error": error})

    async def close(self) -> None:  # type: ignore[override]
        """Ends the session, and gives the connection back."""
        env_id, self._env_id = self._env_id, None
        try:
            if env_id is not None:
                await self._server.ask("terminate", {"env_id": env_id})
        finally:
            await self._server.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _opened(self, request: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """The first observation; waits while the server is full."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._capacity_timeout
        for attempt in itertools.count():
            try:
                return await self._server.ask("initialize", request)
            except AtCapacityError as full:
                wait = min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2**attempt)
                # All episodes of a group have one seed; the attempt's id keeps them from coming back together.
                wait *= generator(seed, "capacity", str(request["attempt_id"]), attempt).uniform(0.5, 1.5)
                if loop.time() + wait > deadline:
                    raise EnvError(
                        f"{full} for {self._capacity_timeout:g} seconds; let it serve more sessions (--max-sessions), "
                        "or roll fewer episodes out at once"
                    ) from full
                await asyncio.sleep(wait)
        raise AssertionError("counting does not end")

    async def _play(self, action: Mapping[str, Any]) -> Step:
        if self._env_id is None:
            raise ResetNeeded("StepProtocolEnv.step: no episode is being played; call reset first")
        request = {"env_id": self._env_id, "step_id": self._num_steps, "action": action}
        answer = await self._server.ask("step", request)
        if (answer.get("env_id"), answer.get("step_id")) != (self._env_id, self._num_steps):
            raise ContractError(
                f"{self._server.where('step')}: expected the answer to step {self._num_steps}, got one to "
                f"{answer.get('step_id')!r:.80}"
            )
        self._num_steps += 1
        result = _result_of(answer, self._server.where("step"))
        return result.messages, _reward_of(result), result.terminated, result.truncated, dict(result.info)


def _result_of(answer: Mapping[str, Any], where: str) -> StepResult:
    return step_result_from_json(answer.get("result"), where=where)


def _reward_of(result: StepResult) -> Any:
    """The reward, with its terms, events and success where it has any; None: not scored (Any: what `step` answers)."""
    is_rich = bool(result.reward_terms or result.events or result.success is not None)
    if result.reward is None or not is_rich:
        return result.reward
    return Reward(result.reward_terms, success=result.success, events=result.events)
