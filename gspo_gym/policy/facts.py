"""What one wants to know of a model before training it, read from its configuration, tokenizer and card alone.

Of a model of the hub, these few files are downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from transformers import GenerationConfig

from gspo_gym.chat.renderer import Renderer
from gspo_gym.chat.template import ChatTemplate, Wire
from gspo_gym.errors import TemplateError
from gspo_gym.policy.bases import CARD, TINY_PREFIX, check_base, whole_model_of
from gspo_gym.policy.gguf import GgufOrigin, origin_of
from gspo_gym.policy.load import folder_of, load_skeleton, load_tokenizer
from gspo_gym.policy.lora import is_adapter
from gspo_gym.policy.stops import eos_ids, hub_file

_USER: Wire = {"role": "user", "content": "zq-user"}
_SYSTEM, _REASONING = "zq-system", "zq-reasoning"
_TOOL = {"name": "NAME", "arguments": {"KEY": "VALUE"}}
_SCHEMA = {
    "type": "function",
    "function": {
        "name": "NAME",
        "description": "An example.",
        "parameters": {"type": "object", "properties": {"KEY": {"type": "string"}}, "required": ["KEY"]},
    },
}
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # the last is gpt-oss's


@dataclass(frozen=True, slots=True)
class TemplateAbilities:
    """What the chat template can show, by rendering examples.

    Attributes:
        refused: why no conversation can be rendered with it; None: it can.
        has_system_role: a system message is shown.
        tools: why it cannot show tools, which then stand in the system message (`rollout.tools_in`); None: it can.
        format: the name of the format in which it writes calls (docs/templates.md); None: it shows no tools.
        call: how it writes a call of NAME with the argument KEY = VALUE; None: not at all.
        shows_reasoning: reasoning in an earlier answer is shown.
        opens_reasoning: the model's turn begins inside a reasoning block.
    """

    refused: str | None
    has_system_role: bool = False
    tools: str | None = None
    format: str | None = None
    call: str | None = None
    shows_reasoning: bool = False
    opens_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a model.

    Attributes:
        num_parameters: shared ones once, an adapter's included.
        num_adapter_parameters: those of its adapter; None: it is a whole model.
        dtype: of the weights in its files, as they say; None: they say none.
        context: the most tokens that it reads; None: it says none.
        num_token_ids, num_rows: ids of the tokenizer, and rows of the embedding: more are padding, never sampled here.
        eos_token_ids: at which its files say that an answer ends.
        sampling: of its generation config, what it asks for besides the defaults.
        license: as its card or its file states it; None: none is stated.
        dequantized: the GGUF file that its weights were dequantized from; None: they are as published.
    """

    architecture: str
    num_parameters: int
    num_adapter_parameters: int | None
    dtype: str | None
    context: int | None
    num_token_ids: int
    num_rows: int
    eos_token_ids: tuple[int, ...]
    sampling: Mapping[str, float | int]
    template: TemplateAbilities
    license: str | None
    dequantized: GgufOrigin | None

    def to_json(self) -> dict[str, Any]:
        """Return the facts as JSON values."""
        return asdict(self)

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield what a person reads: a word and what it is."""
        yield "architecture", self.architecture
        adapter = self.num_adapter_parameters
        yield "parameters", f"{self.num_parameters:,}" + ("" if adapter is None else f", {adapter:,} of an adapter")
        yield "weights", self._weights()
        yield "context", "not stated" if self.context is None else f"{self.context:,} tokens"
        padding = self.num_rows - self.num_token_ids
        padding_text = f"; {padding:,} rows more are padding" if padding > 0 else ""
        yield "vocabulary", f"{self.num_token_ids:,} token ids{padding_text}"
        yield "ends at", ", ".join(map(str, self.eos_token_ids)) or "no id is stated"
        sampling = ", ".join(f"{key} {value:g}" for key, value in self.sampling.items())
        yield "samples at", sampling or "temperature 1: nothing is stated"
        yield from self._template()
        yield "licence", self.license or "not stated"

    def _weights(self) -> str:
        origin, dtype = self.dequantized, self.dtype or "dtype not stated"
        if origin is None:
            return dtype
        types = ", ".join(origin.types)
        return f"{dtype}, dequantized from {types} of {Path(origin.file).name}: not those that were published"

    def _template(self) -> Iterator[tuple[str, str]]:
        template = self.template
        if template.refused is not None:
            yield "chat template", template.refused
            return
        yield "system role", "yes" if template.has_system_role else "no"
        in_system = f"in the system message, because {(template.tools or '').partition('. ')[0]}"
        yield "tools", f"as {template.format}" if template.tools is None else in_system
        if template.call is not None:
            yield "a call", template.call.replace("\n", "\\n")
        reasoning_text = "shown in earlier answers" if template.shows_reasoning else "not shown"
        yield "reasoning", f"{reasoning_text}, opened by the prompt" if template.opens_reasoning else reasoning_text


def facts_of(base: str) -> ModelFacts:
    """Return the facts of the model that `base` names.

    Raises:
        UnknownNameError, CheckpointError, MissingExtraError: as `load_policy`.
    """
    check_base(base)
    tokenizer = load_tokenizer(base)
    model = load_skeleton(base).model
    inner = model.get_base_model() if is_adapter(model) else model
    num_added = sum(p.numel() for p in model.parameters() if p.requires_grad) if is_adapter(model) else None
    config = inner.config.get_text_config()
    generation = generation_config_of(base)
    whole = whole_model_of(base)
    folder = folder_of(whole)
    num_token_ids = 1 + max(tokenizer.get_vocab().values())
    return ModelFacts(
        architecture=type(inner).__name__,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_adapter_parameters=num_added,
        dtype=None if inner.config.dtype is None else str(inner.config.dtype).removeprefix("torch."),
        context=getattr(config, "max_position_embeddings", None),
        num_token_ids=num_token_ids,
        num_rows=inner.get_input_embeddings().weight.shape[0],
        eos_token_ids=eos_ids([tokenizer.eos_token_id, generation.eos_token_id, config.eos_token_id]),
        sampling=sampling_of(generation),
        template=abilities_of(tokenizer),
        license=_license(base) or _license(whole),
        dequantized=None if folder is None else origin_of(folder),
    )


def generation_config_of(base: str) -> GenerationConfig:
    """Return the generation config of the model that `base` names, or of the one below its adapter; else an empty one.

    Raises:
        UnknownNameError, CheckpointError, MissingExtraError: as `check_base`.
    """
    path = _file(whole_model_of(base), "generation_config.json")
    return GenerationConfig() if path is None else GenerationConfig.from_pretrained(path.parent, path.name)


def sampling_of(generation: GenerationConfig) -> dict[str, float | int]:
    """Return the arguments for `Sampling` that a generation config states, as vLLM reads them.

    `do_sample = false` is a temperature of 0; without it, what is stated counts. (transformers samples only if
    `do_sample` is true.)
    """
    config_values = {name: getattr(generation, name, None) for name in _SAMPLING}
    sampling = {name: value for name, value in config_values.items() if value is not None}
    return {**sampling, "temperature": 0.0} if generation.do_sample is False else sampling


def abilities_of(tokenizer: Any) -> TemplateAbilities:
    """Return what the chat template of a tokenizer (Any: untyped) can show."""
    try:
        renderer = Renderer(tokenizer)
    except TemplateError as error:
        return TemplateAbilities(refused=str(error))
    template = ChatTemplate(tokenizer)
    answers: list[Wire] = [{"role": "assistant", "content": "zq-answer", key: _REASONING} for key in _REASONING_KEYS]
    tools = form = None
    try:
        form = Renderer(tokenizer, tool_schemas=[_SCHEMA], tools_in="template").format.name
    except TemplateError as error:
        tools = str(error)
    return TemplateAbilities(
        refused=None,
        has_system_role=_shows(template, _SYSTEM, [{"role": "system", "content": _SYSTEM}, _USER]),
        tools=tools,
        format=form,
        call=_call(ChatTemplate(tokenizer, tool_schemas=[_SCHEMA])) if tools is None else None,
        shows_reasoning=any(_shows(template, _REASONING, [_USER, answer]) for answer in answers),
        opens_reasoning=renderer.opens_reasoning,
    )


def _shows(template: ChatTemplate, text: str, wires: list[Wire]) -> bool:
    return template.accepts(wires) and text in template.text(wires, add_generation_prompt=False)


def _call(template: ChatTemplate) -> str | None:
    """Return a call as the template writes it, between the opening of the model's turn and its end."""
    prompt = template.text([_USER], add_generation_prompt=True)
    for call_id in ("call_0", "zq0000000"):  # Mistral takes nine letters and digits
        call = {"id": call_id, "type": "function", "function": _TOOL}
        wires: list[Wire] = [_USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
        if template.accepts(wires):
            return template.text(wires, add_generation_prompt=False).removeprefix(prompt).strip()
    return None


def _file(base: str, name: str) -> Path | None:
    """Return a file of a model, in its folder or downloaded; None: it has none, or the hub cannot be reached."""
    check_base(base)
    if base.startswith(TINY_PREFIX):
        return None
    if (folder := folder_of(base)) is not None:
        return folder / name if (folder / name).is_file() else None
    return hub_file(base, name)


def _license(base: str) -> str | None:
    """Return the licence that a model's card, or the GGUF file it was converted from, states."""
    card = _file(base, CARD)
    text = "" if card is None else card.read_text(encoding="utf-8", errors="replace")
    if (block := re.match(r"---\n(.*?)\n---", text, re.DOTALL)) is not None:
        try:
            about = yaml.safe_load(block[1])
        except yaml.YAMLError:
            about = None
        if isinstance(about, dict) and about.get("license"):
            return str(about["license"])
    folder = folder_of(base)
    origin = None if folder is None else origin_of(folder)
    return None if origin is None else origin.license
