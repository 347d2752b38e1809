"""Facts about a chat template that its source says and no rendering of marked texts can.

They are the literals that it looks for inside texts, because a message with one of them may be treated differently from
any marked text, and comparisons of messages.
"""

from __future__ import annotations

import re
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gspo_gym.errors import TemplateError

NOW = "strftime_now"  # function of templates for the present time
_SEARCH_METHODS = frozenset(
    {"split", "rsplit", "partition", "rpartition", "startswith", "endswith", "replace", "find", "rfind", "index",
     "count", "removeprefix", "removesuffix"}
)  # fmt: skip


def searched_literals(source: str) -> re.Pattern[str]:
    r"""Return a pattern of the literals that a template looks for in messages, as by `'</think>' in content`.

    Line breaks and spaces are left out: their effect shows on marked texts.

    >>> searched_literals("{% if '</think>' in m.content %}{{ m.content.split('\n') }}{% endif %}").pattern
    '</think>'
    """
    tree = _parse(source)
    inside: set[str] = set()
    whole: set[str] = set()
    for compare in tree.find_all(nodes.Compare):
        operands = [compare.expr, *(operand.expr for operand in compare.ops)]
        if any(operand.op in ("in", "notin") for operand in compare.ops):
            inside |= _constants(compare.expr)
        elif not any(map(_reads_role, operands)):
            whole |= {text for operand in operands if isinstance(operand, nodes.Const) for text in _constants(operand)}
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _SEARCH_METHODS:
            inside |= {text for argument in call.args for text in _constants(argument)}
    for filter_node in tree.find_all(nodes.Filter):
        if filter_node.name == "replace":
            inside |= {text for argument in filter_node.args for text in _constants(argument)}
    patterns = sorted(re.escape(text) for text in inside if text.strip())
    patterns += sorted(rf"\A{re.escape(text)}\Z" for text in whole if text.strip())
    return re.compile("|".join(patterns) or r"(?!)")


def compares_messages(source: str) -> bool:
    """Return whether the template compares two values from the conversation.

    >>> compares_messages("{% if message == messages[-1] %}{% endif %}{% if message.role == 'user' %}{% endif %}")
    True
    """
    values = (nodes.Name, nodes.Getattr, nodes.Getitem)
    return any(
        isinstance(compare.expr, values) and isinstance(operand.expr, values) and operand.op in ("eq", "ne")
        for compare in _parse(source).find_all(nodes.Compare)
        for operand in compare.ops
    )


def require_syntax(source: str) -> None:
    """Raise a TemplateError with the line if a template is no Jinja."""
    try:
        _parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"line {error.lineno}: {error.message}") from error


def _parse(source: str) -> nodes.Template:
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    # transformers' own tag around assistant text; it does not change what is rendered.
    return environment.parse(re.sub(r"\{%-?\s*(?:end)?generation\s*-?%\}", "", source))


def _reads_role(node: nodes.Expr) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "role"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "role"


def _constants(node: Any) -> set[str]:
    values = [node] if isinstance(node, nodes.Const) else list(node.find_all(nodes.Const))
    return {value.value for value in values if isinstance(value.value, str)}
