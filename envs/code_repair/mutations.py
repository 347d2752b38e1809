"""Bugs: small changes of a program's text, found by its syntax tree, each of a kind that people make.

`edits_of` lists every possible one; which of them matter is for `tasks.py` to find out by running tests.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .syntax import parse

_OPERATORS: Mapping[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add,),
    ast.FloorDiv: (ast.Mult, ast.Mod),
    ast.Mod: (ast.FloorDiv,),
}
_BOUNDARIES: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
_OPPOSITES: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.Gt,
    ast.Gt: ast.Lt,
    ast.LtE: ast.GtE,
    ast.GtE: ast.LtE,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_NAMES = {"min": "max", "max": "min", "all": "any", "any": "all"}


@dataclass(frozen=True, slots=True)
class Edit:
    """One change: `new` in place of the characters from `start` to `end`; `kind` says what sort of bug it is."""

    kind: str
    start: int
    end: int
    new: str

    def applied_to(self, source: str) -> str:
        """The text with the bug."""
        return source[: self.start] + self.new + source[self.end :]


def edits_of(source: str) -> dict[str, list[Edit]]:
    """Every edit by kind, in the order of the text; docstrings and annotations stay as they are. ASCII text only."""
    assert source.isascii(), "columns of the syntax tree count bytes"
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    found: dict[str, list[Edit]] = {}
    for node in _code(parse(source)):
        for kind, new in _changes(node):
            start = lines[node.lineno - 1] + node.col_offset
            end = lines[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
            found.setdefault(kind, []).append(Edit(kind, start, end, new))
    return found


def _code(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """All expressions and statements that run."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "args") and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue  # a docstring
            if isinstance(child, ast.expr | ast.stmt):
                yield child
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):  # f-strings have no columns
                yield from _code(child)


def _changes(node: ast.expr | ast.stmt) -> Iterator[tuple[str, str]]:
    """(kind, new text) of one node."""
    if isinstance(node, ast.BinOp):
        for operator in _OPERATORS.get(type(node.op), ()):
            yield "operator", ast.unparse(ast.BinOp(node.left, operator(), node.right))
    elif isinstance(node, ast.AugAssign):
        for operator in _OPERATORS.get(type(node.op), ()):
            yield "operator", ast.unparse(ast.AugAssign(node.target, operator(), node.value))
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        for kind, table in (("boundary", _BOUNDARIES), ("condition", _OPPOSITES)):
            if other := table.get(type(node.ops[0])):
                yield kind, ast.unparse(ast.Compare(node.left, [other()], node.comparators))
    elif isinstance(node, ast.BoolOp):
        swapped = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "condition", f"({ast.unparse(ast.BoolOp(swapped, node.values))})"
        yield "missing part", ast.unparse(node.values[0])
        yield "missing part", ast.unparse(node.values[-1])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "condition", ast.unparse(node.operand)
    elif isinstance(node, ast.Constant):
        yield from _constants(node)
    else:
        yield from _others(node)


def _constants(node: ast.Constant) -> Iterator[tuple[str, str]]:
    if isinstance(node.value, bool):
        yield "wrong value", repr(not node.value)
    elif isinstance(node.value, int):
        yield "off by one", repr(node.value + 1)
        if node.value > 0:
            yield "off by one", repr(node.value - 1)
    elif node.value is None:
        yield "wrong value", "0"
    elif node.value == "":
        yield "wrong value", "' '"


def _others(node: ast.expr | ast.stmt) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Call):
        if len(node.args) == 2 and not node.keywords:
            yield "swapped arguments", ast.unparse(ast.Call(node.func, node.args[::-1], []))
        if isinstance(node.func, ast.Name) and node.func.id == "range":
            stop = node.args[0] if len(node.args) == 1 else node.args[1]
            rest = [ast.BinOp(stop, ast.Sub(), ast.Constant(1)) if each is stop else each for each in node.args]
            yield "boundary", ast.unparse(ast.Call(node.func, rest, []))
    elif isinstance(node, ast.Name) and node.id in _NAMES and isinstance(node.ctx, ast.Load):
        yield "wrong function", _NAMES[node.id]
    elif isinstance(node, ast.IfExp):
        yield "condition", ast.unparse(ast.IfExp(node.test, node.orelse, node.body))
    elif isinstance(node, ast.Return) and node.value is not None:
        yield "missing return", ast.unparse(node.value)
    elif isinstance(node, ast.AugAssign | ast.Expr):
        yield "missing statement", "pass"
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice) and node.slice.lower is not None:
        later = ast.Slice(ast.BinOp(node.slice.lower, ast.Add(), ast.Constant(1)), node.slice.upper, node.slice.step)
        yield "boundary", ast.unparse(ast.Subscript(node.value, later, node.ctx))
