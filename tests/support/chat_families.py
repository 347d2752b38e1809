"""Chat templates of families of models, reduced to how reasoning, texts and calls are written.

Each is our own, of one skeleton, after the public template of the family. Original templates, those that an installed
trl ships, are read by `tests/foreign/test_foreign_templates.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_SKELETON = (
    "{% if tools %}@SYSTEM@{{ tools | tojson }}@END@{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}@ANSWER@"
    "{% if m.reasoning_content %}@REASONING@{% endif %}@CONTENT@"
    "{% if m.tool_calls %}@BEFORE@{% for call in m.tool_calls %}{% set f = call.function %}@CALL@{% endfor %}@AFTER@"
    "{% endif %}@ANSWER_END@"
    "{% elif m.role == 'tool' %}@RESULT@{{ m.content }}@END@"
    "{% else %}@TURN@{{ m.content }}@END@{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}@ANSWER@{% endif %}"
)
_IS_TEXT = "v if v is string else v | tojson"
_FOR = "{% for k, v in f.arguments.items() %}"
_END_FOR = "{% endfor %}"
_OBJECT = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
_SPECIAL = re.compile(
    r"<\|[^<>|\s]+\|?>|<[a-z_]+\|>|<｜[^<>]+｜>|\[/?[A-Z_]{3,}\]|<(?:end_of_turn|start_of_turn|bos|s|sop|eos)>|</s>"
    r"|<\|\"\|>|<SPECIAL_\d+>|\]~!?b\]?\[?|\[e~\[|<(?:begin_of_document|beginning_of_sentence|end_of_sentence)>"
    r"|<seed:[a-z_]+>|</seed:[a-z_]+>|\[gMASK\]"
)
_ADDED = (
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)


@dataclass(frozen=True)
class ChatFamily:
    """One family: Jinja of each part of a conversation, and the format that has to be found.

    `format` is None where the template must be refused, for the reason `refusal`.
    """

    name: str
    format: str | None
    call: str
    refusal: str = ""
    turn: str = "<|im_start|>{{ m.role }}\n"
    answer: str = "<|im_start|>assistant\n"
    end: str = "<|im_end|>\n"
    answer_end: str = ""
    system: str = "<|im_start|>system\n"
    result: str = "<|im_start|>tool\n"
    reasoning: str = "<think>\n{{ m.reasoning_content }}\n</think>\n\n"
    content: str = "{{ m.content }}"
    before: str = ""
    after: str = ""
    head: str = field(default="", repr=False)

    @property
    def template(self) -> str:
        parts = {
            "SYSTEM": self.system, "END": self.end, "ANSWER": self.answer, "REASONING": self.reasoning,
            "CONTENT": self.content, "BEFORE": self.before, "CALL": self.call, "AFTER": self.after,
            "ANSWER_END": self.answer_end or self.end, "RESULT": self.result, "TURN": self.turn,
        }  # fmt: skip
        return self.head + re.sub(r"@([A-Z_]+)@", lambda found: parts[found[1]], _SKELETON)


def _deepseek(name: str, form: str, call: str, **more: str) -> ChatFamily:
    return ChatFamily(
        name, form, call, turn="<｜User｜>", answer="<｜Assistant｜>", end="<｜end▁of▁sentence｜>",
        system="<｜System｜>", result="<｜tool▁output▁begin｜>", reasoning="<think>{{ m.reasoning_content }}</think>",
        **more,
    )  # fmt: skip


def _mistral(name: str, form: str, call: str, **more: str) -> ChatFamily:
    return ChatFamily(
        name, form, call, turn="[INST]{{ m.role }} ", answer="[/INST]", end="</s>", system="[AVAILABLE_TOOLS]",
        result="[TOOL_RESULTS]", reasoning="[THINK]{{ m.reasoning_content }}[/THINK]", **more
    )  # fmt: skip


_SECTION = {"before": "<｜tool▁calls▁begin｜>", "after": "<｜tool▁calls▁end｜>"}
_PYTHON_VALUE = (
    r"""{{ "'" ~ (v | replace('\\', '\\\\') | replace("'", "\\'") | replace('\n', '\\n')) ~ "'" if v is string """
    "else v | tojson if v is mapping or v is iterable else v | string }}"
)
_RAW_PYTHON_VALUE = """{{ "'" ~ v ~ "'" if v is string else v | tojson }}"""
_PYTHON_CALL = "{{ f.name }}(" + _FOR + "{{ ', ' if not loop.first }}{{ k }}=@VALUE@" + _END_FOR + ")"
_GEMMA_VALUE = (
    '{% macro shown(v) %}{% if v is none %}null{% elif v is string %}<|"|>{{ v }}<|"|>'
    "{% elif v is boolean %}{{ 'true' if v else 'false' }}{% elif v is mapping %}{{ '{' }}"
    "{% for k, w in v | dictsort %}{{ ',' if not loop.first }}{{ k }}:{{ shown(w) }}{% endfor %}{{ '}' }}"
    "{% elif v is iterable %}[{% for w in v %}{{ ',' if not loop.first }}{{ shown(w) }}{% endfor %}]"
    "{% else %}{{ v }}{% endif %}{% endmacro %}"
)

FAMILIES = (
    ChatFamily("hermes 3", "hermes", f"\n<tool_call>\n{_OBJECT}\n</tool_call>"),
    ChatFamily(
        "qwen 3.5",
        "qwen-xml",
        "\n<tool_call>\n<function={{ f.name }}>\n" + _FOR + "<parameter={{ k }}>\n"
        "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}\n</parameter>\n"
        + _END_FOR + "</function>\n</tool_call>",
    ),
    ChatFamily(
        "gpt-oss",
        "harmony",
        "{% if loop.first %} to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}"
        "{% endif %}",
        turn="<|start|>{{ m.role }}<|message|>",
        answer="<|start|>assistant",
        end="<|end|>",
        answer_end="{{ '<|call|>' if m.tool_calls else '<|return|>' }}",
        system="<|start|>developer<|message|>",
        result="<|start|>functions to=assistant<|channel|>commentary<|message|>",
        reasoning="<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|><|start|>assistant",
        content="{% if not m.tool_calls %}<|channel|>final<|message|>{{ m.content }}{% elif m.content %}"
        "<|channel|>analysis<|message|>{{ m.content }}<|end|><|start|>assistant{% endif %}",
    ),
    ChatFamily(
        "gemma 4",
        "gemma4",
        "<|tool_call>call:{{ f.name }}{{ '{' }}{% for k, v in f.arguments | dictsort %}{{ ',' if not loop.first }}"
        "{{ k }}:{{ shown(v) }}" + _END_FOR + "}<tool_call|>",
        turn="<|turn>{{ m.role }}\n",
        answer="<|turn>model\n",
        end="<turn|>\n",
        answer_end="{{ '<|tool_response>' if m.tool_calls else '<turn|>\n' }}",
        system="<|turn>system\n",
        result="<|turn>tool\n",
        reasoning="<|channel>thought\n{{ m.reasoning_content }}\n<channel|>",
        head=_GEMMA_VALUE,
    ),
    ChatFamily(
        "lfm 2",
        "lfm2",
        "{{ ', ' if not loop.first }}" + _PYTHON_CALL.replace("@VALUE@", _PYTHON_VALUE),
        before="<|tool_call_start|>[",
        after="]<|tool_call_end|>",
    ),
    ChatFamily(
        "lfm 2, texts not escaped",
        None,
        "{{ ', ' if not loop.first }}" + _PYTHON_CALL.replace("@VALUE@", _RAW_PYTHON_VALUE),
        "nearest is lfm2",
        before="<|tool_call_start|>[",
        after="]<|tool_call_end|>",
    ),
    ChatFamily(
        "muse",
        "muse",
        "{{ '<|eom|><|start|>assistant' if not loop.first }} to={{ f.name }}<|message|><atem:function_calls>\n"
        '<atem:invoke name="{{ f.name }}">\n' + _FOR + '<atem:parameter name="{{ k }}">{{ ' + _IS_TEXT + " }}"
        "</atem:parameter>\n" + _END_FOR + "</atem:invoke>\n</atem:function_calls>",
        turn="<|start|>{{ m.role }}<|message|>",
        answer="<|start|>assistant",
        end="<|eot|>",
        system="<|start|>system<|message|>",
        result="<|start|>tool<|message|>",
        reasoning=" to=self<|message|>{{ m.reasoning_content }}<|eom|><|start|>assistant",
        content="{% if not m.tool_calls %} to=user<|message|>{{ m.content }}{% endif %}",
    ),
    ChatFamily(
        "llama 4",
        "llama3",
        '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
        turn="<|header_start|>{{ m.role }}<|header_end|>\n\n",
        answer="<|header_start|>assistant<|header_end|>\n\n",
        end="<|eot|>",
        system="<|header_start|>system<|header_end|>\n\n",
        result="<|header_start|>ipython<|header_end|>\n\n",
    ),
    ChatFamily(
        "llama 4, calls as in Python",
        "pythonic",
        "{{ ', ' if not loop.first }}" + _PYTHON_CALL.replace("@VALUE@", _PYTHON_VALUE),
        before="[",
        after="]",
    ),
    _mistral(
        "mistral nemo",
        "mistral-list",
        "{{ ', ' if not loop.first }}" + _OBJECT[:-1] + ', "id": "{{ call.id }}"}',
        before="[TOOL_CALLS][",
        after="]",
    ),
    _mistral("devstral", "mistral-args", "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"),
    _mistral(
        "mistral small 3.2",
        "mistral-id",
        "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ call.id }}[ARGS]{{ f.arguments | tojson }}",
    ),
    ChatFamily(
        "glm 4.6",
        "glm4",
        "\n<tool_call>{{ f.name }}\n" + _FOR + "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ " + _IS_TEXT + " }}"
        "</arg_value>\n" + _END_FOR + "</tool_call>",
        turn="<|{{ m.role }}|>\n",
        answer="<|assistant|>",
        end="{{ '' }}",
        system="<|system|>\n",
        result="<|observation|>\n",
        reasoning="\n<think>{{ m.reasoning_content }}</think>",
        content="\n{{ m.content }}",
    ),
    _deepseek(
        "deepseek v3",
        "deepseek-v3",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments + '' }}\n```"
        "<｜tool▁call▁end｜>",
        **_SECTION,
    ),
    _deepseek(
        "deepseek v3.1",
        "deepseek-v3.1",
        "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments + '' }}<｜tool▁call▁end｜>",
        **_SECTION,
    ),
    _deepseek(
        "deepseek v3.2",
        "deepseek-v3.2",
        '\n<｜DSML｜invoke name="{{ f.name }}">' + _FOR + '\n<｜DSML｜parameter name="{{ k }}" '
        "string=\"{{ 'true' if v is string else 'false' }}\">{{ " + _IS_TEXT + " }}</｜DSML｜parameter>" + _END_FOR
        + "\n</｜DSML｜invoke>",
        before="\n\n<｜DSML｜function_calls>",
        after="\n</｜DSML｜function_calls>",
    ),
    ChatFamily(
        "kimi k2",
        "kimi-k2",
        "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>",
        before="<|tool_calls_section_begin|>",
        after="<|tool_calls_section_end|>",
        result="<|im_start|>tool\n## Return of {{ m.tool_call_id }}\n",
        reasoning="<think>{{ m.reasoning_content }}</think>",
    ),
    ChatFamily(
        "minimax m2",
        "minimax-m2",
        '<invoke name="{{ f.name }}">\n' + _FOR + '<parameter name="{{ k }}">{{ ' + _IS_TEXT + " }}</parameter>\n"
        + _END_FOR + "</invoke>\n",
        turn="]~b]{{ m.role }}\n",
        answer="]~b]ai\n",
        end="[e~[\n",
        system="]~b]system\n",
        result="]~b]tool\n",
        before="\n<minimax:tool_call>\n",
        after="</minimax:tool_call>",
    ),
    ChatFamily(
        "minimax m1", "minimax-m1", _OBJECT + "\n", before="<tool_calls>\n", after="</tool_calls>",
        turn="<beginning_of_sentence>{{ m.role }}\n", answer="<beginning_of_sentence>ai\n", end="<end_of_sentence>\n",
        system="<beginning_of_sentence>system\n", result="<beginning_of_sentence>tool\n",
    ),
    ChatFamily(
        "seed oss",
        "seed-oss",
        "\n<seed:tool_call>\n<function={{ f.name }}>\n" + _FOR
        + "<parameter={{ k }}>{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}"
        "</parameter>\n" + _END_FOR + "</function>\n</seed:tool_call>",
        turn="<seed:bos>{{ m.role }}\n",
        answer="<seed:bos>assistant\n",
        end="<seed:eos>",
        system="<seed:bos>system\n",
        result="<seed:bos>tool\n",
        reasoning="<seed:think>{{ m.reasoning_content }}</seed:think>\n",
    ),
    ChatFamily(
        "command a",
        "command",
        '{{ "," if not loop.first }}\n    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", '
        '"parameters": {{ f.arguments | tojson }}}',
        turn="<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{{ m.role }} ",
        answer="<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        end="<|END_OF_TURN_TOKEN|>",
        system="<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>",
        result="<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>",
        reasoning="<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|>",
        content="{% if not m.tool_calls %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}",
        before="<|START_ACTION|>[",
        after="\n]<|END_ACTION|>",
    ),
    ChatFamily("functionary 3.1", "functionary", "<function={{ f.name }}>{{ f.arguments | tojson }}</function>"),
    ChatFamily(
        "nemotron nano 2",
        "nemotron-nano",
        "{{ ', ' if not loop.first }}" + _OBJECT,
        before="\n\n<TOOLCALL>[",
        after="]</TOOLCALL>",
        turn="<SPECIAL_11>{{ m.role }}\n",
        answer="<SPECIAL_11>Assistant\n",
        end="\n<SPECIAL_12>\n",
        system="<SPECIAL_10>System\n",
        result="<SPECIAL_11>Tool\n",
    ),
    ChatFamily(
        "olmo 3",
        "olmo3",
        _PYTHON_CALL.replace("@VALUE@", _PYTHON_VALUE) + "{{ '\n' if not loop.last }}",
        before="<function_calls>\n",
        after="\n</function_calls>",
    ),
    ChatFamily(
        "olmo 3, texts not escaped",
        None,
        _PYTHON_CALL.replace("@VALUE@", _RAW_PYTHON_VALUE) + "{{ '\n' if not loop.last }}",
        "nearest is olmo3",
        before="<function_calls>\n",
        after="\n</function_calls>",
    ),
)  # fmt: skip


def tokenizer_of(template: str) -> Any:  # Any: transformers ships no types
    """Return a tokenizer of bytes that has the special tokens of a template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    written = template.replace("<|{{ m.role }}|>", "<|user|><|system|>")
    special = dict.fromkeys(["<s>", "</s>", *_SPECIAL.findall(written)])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    added = [token for token in _ADDED if token in template]
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
