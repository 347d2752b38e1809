"""An engine of ours as the client of verifiers' environments: their loop and their rubrics, our tokens.

    outputs = await env.generate(inputs, client=verifiers_client(engine, tokenizer), model="policy")

Every answer carries the ids that the engine was given, the ids that it sampled and their logprobs. Within a rollout
nothing sampled is rendered again: a prompt that extends the last one is the last one's ids, the sampled ids, and what
is new. For people who keep verifiers' own loop; to train with this library, use the environment "Verifiers" instead.
"""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gspo_gym_envs.suites.verifiers import as_message, client_asking, response, schema_of

from gspo_gym.chat.parsing import ParseFailure
from gspo_gym.chat.renderer import Renderer
from gspo_gym.engine.base import Engine, SamplingParams
from gspo_gym.errors import ConfigError, ContextOverflowError, GymError, MissingExtraError, nearest_name
from gspo_gym.seeding import child_seed
from gspo_gym.types import FinishReason, Message

# verifiers' (OpenAI's) names of sampling arguments, and ours.
_SAMPLING = {
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_tokens",
}
_NUMBER = "gspo_gym_number"  # in a rollout's state: which of its example's rollouts it is


def verifiers_client(
    engine: Engine,
    tokenizer: Any,
    *,
    max_tokens: int = 1024,
    seed: int = 0,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """A `verifiers.clients.Client` that answers with an engine (Any: the package is untyped).

    Of `sampling_args` it takes max_tokens (or max_completion_tokens), temperature, top_p, top_k, min_p,
    repetition_penalty, min_tokens and seed, also within `extra_body`; other arguments fail the rollout. An answer that
    cannot be read as tool calls or as a closed reasoning block is its whole text. A prompt that does not fit is
    verifiers' OverlongPromptError, and any other failure its ModelError: both are in the rollout's record.

    Args:
        engine: anything with `generate`.
        tokenizer: a transformers tokenizer with a chat template (Any: untyped).
        max_tokens: of one answer, unless `sampling_args` says otherwise.
        seed: of the samples, with the example, the number of its rollout and the turn, unless `sampling_args` has one.
        template_kwargs: as in `Renderer`.

    Raises:
        MissingExtraError: verifiers is not installed.
    """
    try:
        package = importlib.import_module("verifiers")
    except ImportError as error:
        raise MissingExtraError("verifiers' environments need: pip install 'gspo-gym[envs-verifiers]'") from error
    answers = _Answers(package, engine, tokenizer, max_tokens, seed, dict(template_kwargs or {}))
    return client_asking(answers.respond)


class _Answers:
    """The client's work. All that belongs to a rollout is in the rollout's own state."""

    def __init__(
        self, package: Any, engine: Engine, tokenizer: Any, max_tokens: int, seed: int, template_kwargs: dict[str, Any]
    ) -> None:
        self._package, self._engine, self._tokenizer = package, engine, tokenizer
        self._max_tokens, self._seed, self._template_kwargs = max_tokens, seed, template_kwargs
        self._renderers: dict[str, Renderer] = {}  # by tools, as JSON
        self._num_rollouts: Counter[object] = Counter()  # by example

    async def respond(
        self, prompt: Sequence[Any], sampling_args: Mapping[str, Any], tools: Sequence[Any] | None, state: Any
    ) -> Any:
        """A Response with its tokens.

        Raises:
            verifiers' OverlongPromptError: the prompt does not fit. verifiers' ModelError: anything else.
        """
        try:
            return await self._respond(prompt, sampling_args, tools, state)
        except ContextOverflowError as error:
            raise self._package.OverlongPromptError(str(error)) from error
        except GymError as error:
            raise self._package.ModelError(f"{type(error).__name__}: {error}") from error

    async def _respond(
        self, prompt: Sequence[Any], sampling_args: Mapping[str, Any], tools: Sequence[Any] | None, state: Any
    ) -> Any:
        renderer = self._renderer([schema_of(tool) for tool in tools or ()])
        messages = [as_message(message, where="the prompt") for message in prompt]
        prompt_ids = self._prompt_ids(renderer, messages, state)
        completion = await self._engine.generate(prompt_ids, self._sampling(sampling_args, renderer, state))
        is_cut_off = completion.finish_reason is FinishReason.LENGTH
        sampled = [int(token_id) for token_id in completion.token_ids]
        text = renderer.decode(sampled)
        parsed = renderer.parse(text, is_truncated=is_cut_off)
        types = self._package.types
        tokens = types.ResponseTokens(
            prompt_ids=prompt_ids,
            prompt_mask=[0] * len(prompt_ids),
            completion_ids=sampled,
            completion_mask=[1] * len(sampled),
            completion_logprobs=[float(logprob) for logprob in completion.logprobs],
        )
        usage = types.Usage(
            prompt_tokens=len(prompt_ids),
            reasoning_tokens=0,
            completion_tokens=len(sampled),
            total_tokens=len(prompt_ids) + len(sampled),
        )
        said = Message("assistant", text) if isinstance(parsed, ParseFailure) else parsed
        return response(self._package, said, is_cut_off=is_cut_off, tokens=tokens, usage=usage)

    def _renderer(self, schemas: list[dict[str, Any]]) -> Renderer:
        key = json.dumps(schemas, sort_keys=True)
        if key not in self._renderers:
            kwargs = self._template_kwargs
            self._renderers[key] = Renderer(self._tokenizer, tool_schemas=schemas, template_kwargs=kwargs)
        return self._renderers[key]

    def _prompt_ids(self, renderer: Renderer, messages: list[Message], state: Any) -> list[int]:
        """The last turn's ids and what is new, if the prompt extends it; else the whole prompt, rendered."""
        steps = state["trajectory"] if state is not None else ()
        if not steps or steps[-1]["tokens"] is None or steps[-1]["tokens"]["is_truncated"]:
            return renderer.start(messages)
        last = steps[-1]
        known = [as_message(m, where="the last turn") for m in (*last["prompt"], *last["completion"])]
        if messages[: len(known)] != known or len(messages) == len(known):
            return renderer.start(messages)
        ids = last["tokens"]["completion_ids"]
        continuation = renderer.continue_from(
            known, messages[len(known) :], closed=bool(ids) and ids[-1] in renderer.stop_token_ids
        )
        if continuation.is_new_segment:
            return continuation.token_ids
        return [*last["tokens"]["prompt_ids"], *ids, *continuation.token_ids]

    def _sampling(self, sampling_args: Mapping[str, Any], renderer: Renderer, state: Any) -> SamplingParams:
        asked = {**sampling_args, **(sampling_args.get("extra_body") or {})}
        asked.pop("extra_body", None)
        asked = {name: value for name, value in asked.items() if value is not None}
        if asked.pop("n", 1) != 1:
            raise ConfigError(f"sampling_args: expected n = 1, got {sampling_args['n']}")
        asked.pop("logprobs", None)  # always given, and no number of alternatives is
        seed = int(asked.pop("seed", self._seed))
        for name in asked:
            if name not in _SAMPLING:
                raise ConfigError(f"sampling_args: unknown argument {name!r}; {nearest_name(name, _SAMPLING)}")
        ours = {"max_tokens": self._max_tokens} | {_SAMPLING[name]: value for name, value in asked.items()}
        return SamplingParams(**ours, seed=self._turn_seed(seed, state), stop_token_ids=renderer.stop_token_ids)

    def _turn_seed(self, seed: int, state: Any) -> int:
        if state is None:  # somebody asks outside a rollout
            self._num_rollouts[None] += 1
            return child_seed(seed, "call", self._num_rollouts[None])
        example = str(state.get("example_id"))
        if state.get(_NUMBER) is None:
            state[_NUMBER] = self._num_rollouts[example]
            self._num_rollouts[example] += 1
        return child_seed(seed, "rollout", example, state[_NUMBER], len(state["trajectory"]))
