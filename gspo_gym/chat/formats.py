"""The formats in which chat models write reasoning and tool calls: a record each, read by one reader (parsing.py).

A pattern is what a template writes, with fields in braces. White space between its parts is free. The fields are

- `{name}` of the tool, `{id}` of the call, `{index}` of the call in the answer (ignored),
- `{arguments}`, in the form that `Format.arguments` says,
- `{call}`, a JSON object with name and arguments, or `{calls}`, a list of such objects,
- `{text}`, reasoning or content,
- `{key}` and `{value}` of a parameter, and `{is_string}`, "true" if the value is text and not JSON.

Which format a template writes is not declared but proved (proof.py), so a record names no template and no tokenizer.

Ours, because the libraries at hand read otherwise. openai-harmony reads the ids of OpenAI's own vocabulary alone, which
it loads from the network. The response schemas of transformers and the parsers of vLLM are made to serve: they repair
a call that is nearly right or hand it on as text, say nothing that the model could act on, and do not tell a call that
was cut off from a wrong one.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
from dataclasses import dataclass

_FIELD = re.compile(r"\{(name|id|index|arguments|call|calls|text|key|value|is_string)\}")


class Arguments(enum.Enum):
    """The form of a call's arguments."""

    JSON = "a JSON object"
    PARAMETERS = "an element each, typed by the tool's schema"
    QUOTED = "key:value, with a quote token around texts"
    PYTHON = "key=value, as in Python"


@dataclass(frozen=True, slots=True)
class Field:
    """A place in a pattern. `is_padded`: the pattern has white space on both sides, which is not part of a text."""

    name: str
    is_padded: bool


Pieces = tuple[str | Field, ...]


_THINK = "<think>\n{text}\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class Format:
    """One way to write an answer.

    Attributes:
        name: a word, for errors and tables.
        models: who writes it, for tables.
        calls: patterns of one call (or of all, with `{calls}`); the first fits best.
        reasoning: patterns of the reasoning, which comes first.
        content: patterns of the text. `{text}` alone: all that is neither reasoning nor call; others: the answer is a
            sequence of blocks, each of which fits a pattern.
        between: text between blocks.
        section: text before the first and after the last of consecutive calls.
        separator: text between calls of a section.
        arguments: form of the arguments.
        parameter: pattern of one argument of `Arguments.PARAMETERS`.
        quote: the token around texts of `Arguments.QUOTED`.
        name_key, arguments_keys, id_key: keys of the objects of `{call}` and `{calls}`.
        begins: regular expression of an answer that is a call from its beginning on; "": the pattern says where one is.
        begins_cut_off: the same of an answer that `max_tokens` cut off early.
    """

    name: str
    models: str
    calls: tuple[str, ...]
    reasoning: tuple[str, ...] = (_THINK,)
    content: tuple[str, ...] = ("{text}",)
    between: str = ""
    section: tuple[str, str] = ("", "")
    separator: str = ""
    arguments: Arguments = Arguments.JSON
    parameter: str = ""
    quote: str = ""
    name_key: str = "name"
    arguments_keys: tuple[str, ...] = ("arguments", "parameters")
    id_key: str = "id"
    begins: str = ""
    begins_cut_off: str = ""

    @property
    def is_framed(self) -> bool:
        """Whether the answer is a sequence of blocks, so that no text stands outside of them."""
        return self.content != ("{text}",)

    @property
    def opening(self) -> str:
        """The text that begins a call, or a section of calls."""
        return first_text(self.section[0] or self.calls[0])

    @property
    def closing(self) -> str:
        """The text that ends a call, or a section of calls; "" if nothing does."""
        last = pieces(self.section[1] or self.calls[0])[-1:]
        return last[0] if last and isinstance(last[0], str) else ""

    @property
    def tags(self) -> tuple[str, ...]:
        """The texts around reasoning and content, of which an answer that still grows may hold a part."""
        patterns = (*self.reasoning, *self.content, self.between)
        return tuple(piece for pattern in patterns for piece in pieces(pattern) if isinstance(piece, str))


@functools.cache
def pieces(pattern: str) -> Pieces:
    r"""Return the texts and fields of a pattern, in order; white space is left out.

    >>> pieces("<f={name}>\n{arguments}</f>")
    ('<f=', Field(name='name', is_padded=False), '>', Field(name='arguments', is_padded=False), '</f>')
    """
    parts = _FIELD.split(pattern)  # texts, with the names of fields between them
    result: list[str | Field] = []
    for number, part in enumerate(parts):
        if number % 2 == 0:
            result += part.split()
        else:
            result.append(Field(part, parts[number - 1][-1:] == "\n" and parts[number + 1][:1] == "\n"))
    return tuple(result)


def first_text(pattern: str) -> str:
    """Return the text that a pattern begins with; "" if it begins with a field."""
    first = pieces(pattern)[:1]
    return first[0] if first and isinstance(first[0], str) else ""


def reasoning_tags(pattern: str) -> tuple[str, str]:
    """Return the texts before and after the reasoning.

    >>> reasoning_tags("<think>{text}</think>")
    ('<think>', '</think>')
    """
    opening, _, closing = pattern.partition("{text}")
    return opening.strip(), closing.strip()


_XML_CALL = "<function={name}>\n{arguments}</function>\n"
_XML_PARAMETER = "<parameter={key}>\n{value}\n</parameter>\n"

FORMATS: tuple[Format, ...] = (
    Format("hermes", "Qwen 2.5, Qwen 3, Hermes 2 and 3, QwQ", calls=("<tool_call>\n{call}\n</tool_call>",)),
    Format(
        "qwen-xml",
        "Qwen 3.5, 3.6 and 3.8, Qwen3-Coder, Nemotron 3",
        calls=(f"<tool_call>\n{_XML_CALL}</tool_call>",),
        arguments=Arguments.PARAMETERS,
        parameter=_XML_PARAMETER,
    ),
    Format(
        "harmony",
        "gpt-oss",
        # The template's spelling, and those that the model samples.
        calls=(
            " to=functions.{name}<|channel|>commentary json<|message|>{arguments}",
            " to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>{arguments}",
            "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}",
            "<|channel|>commentary to=functions.{name}<|message|>{arguments}",
        ),
        reasoning=("<|channel|>analysis<|message|>{text}",),
        content=("<|channel|>final<|message|>{text}", "<|channel|>commentary<|message|>{text}"),
        between="<|end|> <|start|>assistant",
    ),
    Format(
        "gemma4",
        "Gemma 4",
        calls=("<|tool_call>call:{name}{{arguments}}<tool_call|>",),
        reasoning=("<|channel>thought\n{text}\n<channel|>",),
        arguments=Arguments.QUOTED,
        quote='<|"|>',
    ),
    Format(
        "lfm2",
        "LFM2, LFM2.5",
        calls=("{name}({arguments})",),
        section=("<|tool_call_start|>[", "]<|tool_call_end|>"),
        separator=",",
        arguments=Arguments.PYTHON,
    ),
    Format(
        "muse",
        "Muse Glimmer",
        calls=(
            ' to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n{arguments}</atem:invoke>\n'
            "</atem:function_calls>",
        ),
        reasoning=(" to=self<|message|>{text}",),
        content=(" to=user<|message|>{text}",),
        between="<|eom|> <|start|>assistant",
        arguments=Arguments.PARAMETERS,
        parameter='<atem:parameter name="{key}">{value}</atem:parameter>\n',
    ),
    Format(
        "llama3",
        "Llama 3.1 to 3.3, Llama 4 with a template of JSON",
        calls=("{call}", "<|python_tag|>{call}"),
        # An answer that is one JSON object with a name and arguments is a call; other JSON is an answer.
        begins=r'<\|python_tag\|>|\{(?=.*"name")(?=.*"(?:parameters|arguments)")',
        begins_cut_off=r'\{\s*"name"\s*:',
    ),
    Format(
        "mistral-list",
        "Mistral 7B v0.3, Nemo, Mistral Small 3.1",
        calls=("[TOOL_CALLS]{calls}",),
        reasoning=(_THINK, "[THINK]{text}[/THINK]"),
    ),
    Format(
        "mistral-args",
        "Devstral, Magistral, Ministral 3",
        calls=("[TOOL_CALLS]{name}[ARGS]{arguments}",),
        reasoning=(_THINK, "[THINK]{text}[/THINK]"),
    ),
    Format(
        "mistral-id",
        "Mistral Small 3.2",
        calls=("[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]{arguments}",),
        reasoning=(_THINK, "[THINK]{text}[/THINK]"),
    ),
    Format(
        "glm4",
        "GLM 4.5, 4.6 and 4.7",
        calls=("<tool_call>{name}\n{arguments}</tool_call>",),
        arguments=Arguments.PARAMETERS,
        parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    ),
    Format(
        "deepseek-v3",
        "DeepSeek V3, R1",
        calls=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",),
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    Format(
        "deepseek-v3.1",
        "DeepSeek V3.1",
        calls=("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",),
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    Format(
        "deepseek-v3.2",
        "DeepSeek V3.2",
        calls=('<｜DSML｜invoke name="{name}">\n{arguments}</｜DSML｜invoke>\n',),
        section=("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
        arguments=Arguments.PARAMETERS,
        parameter='<｜DSML｜parameter name="{key}" string="{is_string}">{value}</｜DSML｜parameter>\n',
    ),
    Format(
        "kimi-k2",
        "Kimi K2",
        calls=("<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",),
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    Format(
        "minimax-m2",
        "MiniMax M2",
        calls=('<invoke name="{name}">\n{arguments}</invoke>\n',),
        section=("<minimax:tool_call>\n", "</minimax:tool_call>"),
        arguments=Arguments.PARAMETERS,
        parameter='<parameter name="{key}">{value}</parameter>\n',
    ),
    Format("minimax-m1", "MiniMax M1", calls=("{call}\n",), section=("<tool_calls>\n", "</tool_calls>")),
    Format(
        "seed-oss",
        "Seed-OSS",
        calls=(_XML_CALL,),
        section=("<seed:tool_call>\n", "</seed:tool_call>"),
        reasoning=("<seed:think>{text}</seed:think>",),
        arguments=Arguments.PARAMETERS,
        parameter="<parameter={key}>{value}</parameter>\n",
    ),
    Format(
        "command",
        "Command R7B, Command A",
        calls=("<|START_ACTION|>{calls}<|END_ACTION|>",),
        reasoning=("<|START_THINKING|>{text}<|END_THINKING|>",),
        content=("<|START_RESPONSE|>{text}",),  # <|END_RESPONSE|> is what ends the turn
        name_key="tool_name",
        id_key="tool_call_id",
    ),
    Format("functionary", "Functionary 3.1", calls=("<function={name}>{arguments}</function>",)),
    Format("nemotron-nano", "Nemotron Nano 2, Llama Nemotron", calls=("<TOOLCALL>{calls}</TOOLCALL>",)),
    Format(
        "olmo3",
        "Olmo 3",
        calls=("{name}({arguments})\n",),
        section=("<function_calls>", "</function_calls>"),
        arguments=Arguments.PYTHON,
    ),
    Format(
        "pythonic",
        "Llama 3.2, Llama 4 and Gemma 3 with a template of Python calls",
        calls=("{name}({arguments})",),
        section=("[", "]"),
        separator=",",
        arguments=Arguments.PYTHON,
        begins=r"\[\s*[A-Za-z_][\w.-]*\(",
    ),
)


THINK_TAGS = reasoning_tags(_THINK)


def all_reasoning_tags() -> list[tuple[str, str]]:
    """Return the texts before and after reasoning of all formats, each pair once."""
    return list(dict.fromkeys(reasoning_tags(pattern) for form in FORMATS for pattern in form.reasoning))


def plain_formats() -> tuple[Format, ...]:
    """Return the formats of answers whose calls are written as plain text in Hermes's form (plain.py)."""
    hermes = format_named("hermes")
    reasonings = dict.fromkeys(form.reasoning for form in FORMATS if not form.is_framed)
    return tuple(dataclasses.replace(hermes, reasoning=reasoning) for reasoning in reasonings)


def format_named(name: str) -> Format:
    """Return the format of that name."""
    return next(form for form in FORMATS if form.name == name)
