"""Proof that what a chat template writes can be read: awkward answers are written by it, and must come back equal.

An answer goes the way of a sampled one: message, template, token ids, `Renderer.decode`, `parse_action`. The format of
the template is the one that reads all of them. What the template refuses to write (reasoning beside calls, say) need
not be read.

Not compared: ids of calls, the order of arguments (Gemma 4 sorts them), white space around a text, which some templates
add, and whether reasoning is absent or empty, because some write an empty block where there was none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gspo_gym.chat.formats import Format
from gspo_gym.chat.formats import reasoning_tags as tags_of
from gspo_gym.chat.parsing import ParseFailure, parameters_of, parse_action
from gspo_gym.chat.template import plain_json
from gspo_gym.chat.values import allowed_types, quote
from gspo_gym.errors import TemplateError
from gspo_gym.types import Message, ToolCall

# Both kinds of quotes, line breaks, a backslash, braces, tags of other formats, other scripts, and letters that are
# two of UTF-16.
_AWKWARD = "a \"b\" 'c'\n\n  d\\n {e: [1]} <f>&</f> é 日本 🙂 %s {{g}}, h=1"
_ARGUMENTS: Mapping[str, Any] = {
    "text": _AWKWARD,
    "digits": "007",
    "word": "true",
    "empty": "",
    "integer": -3,
    "number": 0.5,
    "large": 1e30,
    "yes": True,
    "no": False,
    "object": {"a": [1, None, {"b": "c 'd'"}], "e": {}, "f": True},
    "array": ["x", "y, z", 2.5, False, []],
    "none": None,
}
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}
_VALUES = {"integer": 7, "number": 0.5, "boolean": True, "array": [], "object": {}, "null": None, "string": _AWKWARD}
_TOOL = "probe_tool"
_SCHEMA: Mapping[str, Any] = {
    "name": _TOOL,
    "parameters": {
        "type": "object",
        "properties": {key: {"type": _TYPES.get(type(value), "null")} for key, value in _ARGUMENTS.items()},
    },
}
_MAX_TOOLS = 16  # of the environment's own, each of which is called once


@dataclass(frozen=True, slots=True)
class Proof:
    """What was proved of a template.

    Attributes:
        format: reads what the template writes.
        keeps_text_beside_calls: a text beside calls comes back as one. gpt-oss's template makes it reasoning, and
            Llama 4's call behind a text cannot be told from text.
    """

    format: Format
    keeps_text_beside_calls: bool


@dataclass(frozen=True, slots=True)
class _Sample:
    """One answer and what the template writes for it; `kind` says which."""

    kind: str
    message: Message
    text: str


def prove(
    write: Callable[[Message], str],
    spell: Callable[[str], str],
    *,
    name: str,
    formats: Sequence[Format],
    tool_schemas: Sequence[Mapping[str, Any]],
    max_tool_calls: int | None,
    starts_in_reasoning: bool,
    reasoning_tags: tuple[str, str],
) -> Proof:
    """Return the format that reads what a template writes.

    Args:
        write: returns the text that the model would have to sample for a message; a TemplateError if the template
            cannot show it.
        spell: returns what the tokenizer can spell of a text; a small vocabulary is no fault of the template.
        name: of the template, for errors.
        formats: those that may be it; the first of several.
        starts_in_reasoning: the prompt opens reasoning. The template need not write a text then: many drop reasoning
            from answers (DeepSeek R1).
        reasoning_tags: those in the template, which decide where its answers fit several formats.

    Raises:
        TemplateError: no format reads all of it, or the template can write no text or no call; names the format that
            comes nearest, what the template wrote, and what was read.
    """
    answers = [(kind, _spell_message(message, spell)) for kind, message in _answers(tool_schemas, max_tool_calls)]
    samples, refusals = _write_samples(write, answers)
    for kind, is_needed in (("a text", not starts_in_reasoning), ("a call", bool(tool_schemas))):
        if is_needed and not any(kind in sample.kind for sample in samples):
            raise TemplateError(refusals[kind])
    schemas = parameters_of([*tool_schemas, _SCHEMA])
    nearest: tuple[tuple[int, bool], str] = ((-1, False), "")
    for form in sorted(formats, key=lambda form: reasoning_tags not in map(tags_of, form.reasoning)):
        keeps_text = True
        for number, sample in enumerate(samples):
            result = parse_action(
                sample.text,
                form,
                has_tools=bool(tool_schemas),
                is_truncated=False,
                starts_in_reasoning=starts_in_reasoning,
                parameters=schemas,
            )
            fault = _difference(sample.message, result)
            if fault is None:
                continue
            if sample.message.content and sample.message.tool_calls:
                keeps_text = False
                continue
            is_call = isinstance(result, ParseFailure) or bool(result.tool_calls)
            nearest = max(
                nearest, ((number, is_call), _explain(name, form, sample, fault)), key=lambda candidate: candidate[0]
            )
            break
        else:
            return Proof(form, keeps_text)
    raise TemplateError(nearest[1])


def _spell_message(message: Message, spell: Callable[[str], str]) -> Message:
    calls = [replace(call, arguments=plain_json(call.arguments, spell)) for call in message.tool_calls]
    reasoning = message.reasoning_content and spell(message.reasoning_content)
    return replace(message, content=spell(message.content), tool_calls=tuple(calls), reasoning_content=reasoning)


def _write_samples(
    write: Callable[[Message], str], answers: Sequence[tuple[str, Message]]
) -> tuple[list[_Sample], dict[str, str]]:
    """Return the answers that the template can write, and by kind why it cannot write others."""
    samples: list[_Sample] = []
    refusals: dict[str, str] = {}
    for kind, message in answers:
        try:
            samples.append(_Sample(kind, message, write(message)))
        except TemplateError as error:
            refusals.setdefault("a call" if message.tool_calls else "a text", str(error))
    return samples, refusals


def _answers(tool_schemas: Sequence[Mapping[str, Any]], max_tool_calls: int | None) -> list[tuple[str, Message]]:
    text = Message("assistant", f"Seven. {_AWKWARD}")
    answers = [("a text", text), ("a text with reasoning", replace(text, reasoning_content=f"Hm. {_AWKWARD}"))]
    if not tool_schemas:
        return answers
    whole = ToolCall("call_0", _TOOL, _ARGUMENTS)
    calls: dict[str, tuple[ToolCall, ...]] = {
        "a call": (whole,),
        "a call without arguments": (ToolCall("call_0", _TOOL, {}),),
    }
    if max_tool_calls is None:
        calls["a call and another"] = (whole, ToolCall("call_1", _TOOL, {"empty": ""}))
    calls |= {f"a call of {call.name}": (call,) for call in _own_calls(tool_schemas)}
    for kind, kind_calls in calls.items():
        message = Message("assistant", "", tool_calls=kind_calls)
        answers += [(kind, message), (f"{kind} with reasoning", replace(message, reasoning_content="Hm.\n\nSo."))]
        answers.append((f"{kind} with a text", replace(message, content="I look.\n\nNow.")))
    return answers


def _own_calls(tool_schemas: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
    """Return a call of each of the environment's tools: a format must be able to hold their names and parameters."""
    tools = list(parameters_of(tool_schemas).items())[:_MAX_TOOLS]
    return [
        ToolCall("call_0", tool, {key: _value_of(schema) for key, schema in schemas.items()}) for tool, schemas in tools
    ]


def _value_of(schema: Any) -> Any:
    """Return some value that a JSON schema allows; null if it allows anything, or says it in another way."""
    if isinstance(schema, Mapping) and isinstance(schema.get("enum"), list) and schema["enum"]:
        return next((value for value in schema["enum"] if not isinstance(value, str)), schema["enum"][0])
    type_names = allowed_types(schema) or {"null"}
    # A text comes last: where other types are allowed, one that spells them comes back as them.
    return next((value for name, value in _VALUES.items() if name in type_names), None)


def _difference(message: Message, result: Message | ParseFailure) -> str | None:
    """Return what was read of an answer if it is not what was said, else None."""
    if isinstance(result, ParseFailure):
        return result.error
    parts = {
        "the text": (message.content.strip(), result.content.strip()),
        "the reasoning": (message.reasoning_content or "", result.reasoning_content or ""),
        "the calls": (_calls_of(message), _calls_of(result)),
    }
    for part, (original, read_text) in parts.items():
        if original != read_text:
            return f"{part} {_first_difference(original, read_text)}"
    return None


def _calls_of(message: Message) -> str:
    # As JSON, in which 1, 1.0 and true differ.
    return json.dumps([[call.name, call.arguments] for call in message.tool_calls], sort_keys=True, ensure_ascii=False)


def _first_difference(original: str, read_text: str) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(original, read_text, strict=False)) if a != b),
        min(len(original), len(read_text)),
    )
    start = max(0, at - 15)
    return f"came back as {quote(read_text[start:])} instead of {quote(original[start:])}"


def _explain(name: str, form: Format, sample: _Sample, fault: str) -> str:
    advice = "another chat template (model.chat_template)"
    if sample.message.tool_calls:
        advice += ', or put the tools into the system message (rollout.tools_in = "system_message")'
    return (
        f"{name} writes {sample.kind} in no format that can be read back. The nearest is {form.name} "
        f"({form.models}), but of {quote(sample.text)}: {fault}. Use {advice}"
    )
