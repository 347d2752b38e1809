"""`gspo-gym models chat MODEL`: talk with a model, or have it play an environment, at a terminal or behind a pipe."""

from __future__ import annotations

import argparse
import re
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gspo_gym.base.loops import run_to_end
from gspo_gym.chat.renderer import RendererCache
from gspo_gym.cli.command_line import RUNS_OWN, env_config_of
from gspo_gym.cli.env import as_sampled
from gspo_gym.cli.models_serve import running_engine, sampling_for, with_options
from gspo_gym.engine.base import Engine, SamplingParams
from gspo_gym.env.registry import resolve
from gspo_gym.env.session import EnvSession
from gspo_gym.env.workers.isolation import isolated_factory
from gspo_gym.errors import ContextOverflowError, RecordError, TemplateError, UsageError
from gspo_gym.remote.gateway.capture import ChatCall
from gspo_gym.remote.gateway.session import GatewaySession, GatewaySessionSettings
from gspo_gym.remote.gateway.slices import GrowingText, SlicedEngine
from gspo_gym.rollout.actors import scripted_completion
from gspo_gym.rollout.adapter import TokenObservationWrapper
from gspo_gym.seeding import child_seed
from gspo_gym.types import Completion, Message, Sampling

if TYPE_CHECKING:
    from gspo_gym.run.models import Model

_MAX_LEN = 4096  # tokens of a conversation, unless the model reads fewer
_OF_THE_RUN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # in [rollout]
_COMMAND = re.compile(r"/[a-z]+")
_HELP = "/reset forgets the conversation, /help shows this, /quit ends"
_HELP_TO_PLAY = "Enter lets the model act, a line of yours acts for it; /help shows this, /quit ends"

Read = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class _Game:
    """An environment to play: its name, constructor's arguments (JSON) and limit of turns."""

    name: str
    config: dict[str, Any]
    max_turns: int


def chat(arguments: argparse.Namespace, read: Read) -> None:
    """Talk or play until the input ends, /quit, or the end of the episode."""
    from gspo_gym.run.models import find_model

    model = find_model(arguments.model, runs=arguments.folder)
    game = None if arguments.env is None else _game(model, arguments)
    if game is None and (arguments.option or arguments.max_turns is not None):
        raise UsageError("--option and --max-turns: expected only with --env")
    run_to_end(_talk(model, arguments, read) if game is None else _play(model, game, arguments, read))


def _game(model: Model, arguments: argparse.Namespace) -> _Game:
    own = model.config.get("rollout", {}) if arguments.env == RUNS_OWN else {"env_name": arguments.env}
    if "env_name" not in own:
        raise UsageError(f"--env: {model.name} is of no run, which would say what it plays: name the environment")
    config = {**own.get("env_config", {}), **env_config_of(arguments.option)}
    return _Game(own["env_name"], config, arguments.max_turns or own.get("max_turns", 20))


class _Conversation:
    """A conversation with a model; shows each answer while it is sampled.

    Args:
        engine, renderers, settings: of the session.
        opening: messages before the person's first one.
    """

    def __init__(
        self, engine: Engine, renderers: RendererCache, settings: GatewaySessionSettings, opening: Sequence[Message]
    ) -> None:
        self._engine, self._renderers, self._settings = engine, renderers, settings
        self._opening = tuple(opening)
        self._messages = self._opening
        self._session: GatewaySession | None = None
        self._text = GrowingText(renderers.for_tools(()))
        self._num_begun = 0

    async def reset(self) -> None:
        """Forget what was said."""
        if self._session is not None:
            await self._session.abort()
        self._session, self._messages = None, self._opening

    async def answer(self, text: str) -> bool:
        """Show the model's answer to `text`; return whether it was cut off.

        Raises:
            ContextOverflowError: there is no room for an answer.
            TemplateError: the chat template refuses the message.
        """
        if self._session is None:
            # Else a conversation after /reset would repeat the samples of the first.
            seed = child_seed(self._settings.sampling_seed, "conversation", self._num_begun)
            self._session = GatewaySession(
                replace(self._settings, sampling_seed=seed),
                engine=SlicedEngine(self._engine, grown=lambda ids: _show(self._text.grow(ids))),
                renderers=self._renderers,
                clock=time.monotonic,
                forget=lambda _: None,
            )
            self._num_begun += 1
        self._text = GrowingText(self._renderers.for_tools(()))
        messages = (*self._messages, Message("user", text))
        call = await self._session.chat(ChatCall(messages))
        _show(self._text.rest(call.answer))
        self._messages = (*messages, call.answer)
        return call.finish_reason == "length"


async def _talk(model: Model, arguments: argparse.Namespace, read: Read) -> None:
    async with _running(model, arguments) as (engine, tokenizer):
        settings = GatewaySessionSettings(
            name="chat",
            sampling_seed=secrets.randbelow(2**31) if arguments.seed is None else arguments.seed,
            max_output_tokens=arguments.max_tokens or 512,
            max_model_len=engine.capabilities.max_model_len,
            sampling=sampling_for(model, arguments),
            # Limits are for training episodes; a person ends a conversation.
            max_calls=2**31,
            max_captured_tokens=2**40,
        )
        renderers = _renderers(model, tokenizer)
        opening = () if arguments.system is None else (Message("system", arguments.system),)
        conversation = _Conversation(engine, renderers, settings, opening)
        help_text = f"{model.name} ({_sampling_text(settings.sampling)}): {_HELP}"
        print(help_text)
        while (line := _read(read, "you> ")) not in (None, "/quit"):
            if line == "/reset":
                await conversation.reset()
                print("forgotten")
                continue
            if line and _COMMAND.fullmatch(line):
                print(help_text)
                continue
            print("model> ", end="", flush=True)
            try:
                is_cut = await conversation.answer(line or "")
                print(" [cut off at --max-tokens]" if is_cut else "")
            except (ContextOverflowError, TemplateError) as error:
                print(f"\n{type(error).__name__}: {error} (/reset begins anew)")


async def _play(model: Model, game: _Game, arguments: argparse.Namespace, read: Read) -> None:
    async with _running(model, arguments) as (engine, tokenizer):
        env_id = resolve(game.name)
        session = EnvSession(isolated_factory(env_id, game.config)(), env_id=env_id)
        wrapper = TokenObservationWrapper(
            session,
            tokenizer,
            game.max_turns,
            tokenizer.pad_token_id or 0,
            engine.capabilities.max_model_len,
            arguments.max_tokens or model.config.get("rollout", {}).get("max_output_tokens", 512),
            renderer=_renderers(model, tokenizer).for_tools(session.tool_schemas),
            system_prompt=arguments.system or _policy_config(model).get("system_prompt"),
        )
        try:
            await _play_episode(
                wrapper, engine, _sampling_to_play(model, arguments), seed=arguments.seed or 0, read=read
            )
        finally:
            await wrapper.close_async()


async def _play_episode(
    wrapper: TokenObservationWrapper, engine: Engine, sampling: Sampling, *, seed: int, read: Read
) -> None:
    _, info = await wrapper.reset_async(seed)
    _show_messages(info["new_messages"])
    has_input = True
    while wrapper.outcome is None:
        line = _read(read, "Enter: the model acts> ") if has_input else None
        has_input = line is not None  # where the input ends, the model plays on
        if line == "/quit":
            break
        if line and _COMMAND.fullmatch(line):
            print(f"{_HELP_TO_PLAY} ({_sampling_text(sampling)})")
            continue
        by_person = scripted_completion(as_sampled(wrapper, line)) if line else None
        completion = by_person or await _sample(wrapper, engine, sampling, seed)
        try:
            _, reward, _, _, info = await wrapper.step_async(completion)
        except RecordError as error:  # of what a person typed: the turn is still open
            print(error)
            continue
        _show_messages(info["new_messages"])
        print(f"  reward {reward}")
    record = wrapper.episode()
    total = sum(reward for reward in record.rewards if reward is not None)
    print(f"{record.outcome.value if record.outcome else 'stopped'}, return {total:+.3f}")


async def _sample(wrapper: TokenObservationWrapper, engine: Engine, sampling: Sampling, seed: int) -> Completion:
    """Sample the model's action, and show it meanwhile."""
    text = GrowingText(wrapper.renderer, has_tools=bool(wrapper.session.tool_schemas))
    params = SamplingParams.of(
        sampling,
        max_tokens=wrapper.max_tokens,
        stop_token_ids=wrapper.renderer.stop_token_ids,
        seed=child_seed(seed, "turn", wrapper.num_turns),
    )
    print("model> ", end="", flush=True)
    sliced_engine = SlicedEngine(engine, grown=lambda ids: _show(text.grow(ids)))
    completion = await sliced_engine.generate(wrapper.prompt, params, session_id="play")
    full_text = wrapper.renderer.decode(completion.token_ids)
    print(full_text.removeprefix(text.content) if not text.reasoning else f"\n{full_text}")
    return completion


@asynccontextmanager
async def _running(model: Model, arguments: argparse.Namespace) -> AsyncIterator[tuple[Engine, Any]]:
    settings = argparse.Namespace(
        engine="local", dtype=arguments.dtype or "auto", device=arguments.device, max_model_len=_MAX_LEN, max_num_seqs=1
    )
    async with running_engine(model, settings) as running:
        yield running


def _sampling_to_play(model: Model, arguments: argparse.Namespace) -> Sampling:
    """Return how the model acts: as in its run, or for one of no run as it answers."""
    if model.run is None:
        return sampling_for(model, arguments)
    rollout = model.config.get("rollout", {})
    return with_options({name: rollout[name] for name in _OF_THE_RUN if name in rollout}, arguments)


def _sampling_text(sampling: Sampling) -> str:
    """Return the temperature, and what else is not at its default.

    >>> _sampling_text(Sampling(temperature=0.2, top_p=0.9))
    'temperature 0.2, top_p 0.9'
    """
    names = dict.fromkeys(("temperature", *sampling.changed()))
    return ", ".join(f"{name} {getattr(sampling, name):g}" for name in names)


def _renderers(model: Model, tokenizer: Any) -> RendererCache:
    """Return the renderers of messages (Any: transformers), set as in the run that trained the model."""
    return RendererCache(
        tokenizer,
        template_kwargs=_policy_config(model).get("chat_template_kwargs"),
        tools_in=model.config.get("rollout", {}).get("tools_in", "auto"),
    )


def _policy_config(model: Model) -> Mapping[str, Any]:
    """Return the run's [rollout.policy_config] (JSON values)."""
    values: Mapping[str, Any] = model.config.get("rollout", {}).get("policy_config", {})
    return values


def _read(read: Read, prompt: str) -> str | None:
    """Return a line, or None at the end of the input."""
    try:
        line = read(prompt).strip()
    except EOFError:
        print()
        return None
    if not sys.stdin.isatty():
        # A terminal shows what is typed; behind a pipe it would be missing from the output.
        print(line)
    return line


def _show(pieces: tuple[str, str]) -> None:
    """Print new pieces of reasoning and content."""
    print("".join(pieces), end="", flush=True)


def _show_messages(messages: Sequence[Message]) -> None:
    for message in messages:
        print(f"{message.role}> {message.content}")
