"""Small changes to a Python file, each of which a test should notice. Nothing here runs a test.

A change is found in the syntax tree and written into the text, so that comments and layout stay and a mutant reads as
one changed line. Left out is what no test could notice: annotations, docstrings, decorators, strings, f-strings,
`assert` (which guards against bugs of our own), `if TYPE_CHECKING` and `zip(strict=...)`.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from gspo_gym.seeding import generator

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
# Calls that are replaced by their first argument.
_REDUCING_CALLS = ("abs", "max", "min", "round", "sorted")
_DELETED = (ast.AugAssign, ast.Raise, ast.Delete, ast.Continue, ast.Break)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of a file.

    Attributes:
        line: the line of the change, from 1.
        kind: what was changed, such as "comparison".
        text: the whole file with the change.
        diff: the changed lines, as a unified diff without its head.
    """

    line: int
    kind: str
    text: str
    diff: str


def draw_mutants(text: str, name: str, *, count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants of the Python source `text`, or all if there are fewer, in the order of their lines.

    Drawn without replacement by the seed and the file's name, so that they do not depend on the other files.

    >>> [mutant.diff for mutant in draw_mutants("def f(x):\\n    return x > 0\\n", "f.py", count=9, seed=0)][1]
    '-    return x > 0\\n+    return x >= 0'
    """
    tree = ast.parse(text)
    changes = list(_changes(tree))
    drawn: dict[int, Mutant] = {}
    for i in generator(seed, "mutants", name).permutation(len(changes)).tolist():
        mutant = _written(text, tree, changes[i])
        if mutant is not None and len(drawn) < count:
            drawn[i] = mutant
        if len(drawn) == count:
            break
    return sorted((drawn[i] for i in sorted(drawn)), key=lambda mutant: mutant.line)


@dataclass(frozen=True, slots=True)
class _Change:
    node: ast.expr | ast.stmt
    new: ast.expr | ast.stmt
    kind: str


def _changes(tree: ast.Module) -> Iterator[_Change]:
    for node in _mutable_nodes(tree):
        if isinstance(node, ast.expr):
            yield from (_Change(node, new, kind) for new, kind in _expression_changes(node))
        elif isinstance(node, ast.stmt):
            yield from (_Change(node, new, kind) for new, kind in _statement_changes(node))
        tests = [node.test] if isinstance(node, ast.If | ast.While | ast.IfExp) else []
        tests += node.ifs if isinstance(node, ast.comprehension) else []
        for test in tests:
            if not isinstance(test, ast.Compare | ast.UnaryOp):  # those are negated as what they are
                yield _Change(test, ast.UnaryOp(ast.Not(), test), "negation")


def _mutable_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_left_out(node, child):
                yield child
                yield from _mutable_nodes(child)


def _is_left_out(parent: ast.AST, child: ast.AST) -> bool:
    if isinstance(child, ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom):
        return True
    if isinstance(child, ast.keyword) and isinstance(parent, ast.Call):
        return child.arg == "strict" and ast.unparse(parent.func) == "zip"
    return isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)


def _expression_changes(node: ast.expr) -> Iterator[tuple[ast.expr, str]]:
    if isinstance(node, ast.Constant):
        yield from ((ast.Constant(value), "constant") for value in _other_constants(node.value))
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        for operator in _COMPARISONS[type(node.ops[0])]:
            yield ast.Compare(node.left, [operator()], node.comparators), "comparison"
    elif isinstance(node, ast.Compare):
        for i, old in enumerate(node.ops):
            ops = [*node.ops[:i], _COMPARISONS[type(old)][0](), *node.ops[i + 1 :]]
            yield ast.Compare(node.left, ops, node.comparators), "comparison"
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values), "and/or"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand, "negation"
    elif isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
        yield node.operand, "arithmetic"
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        yield ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right), "arithmetic"
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in _REDUCING_CALLS and node.args:
        yield node.args[0], "call"


def _other_constants(value: object) -> tuple[bool | int | float, ...]:
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (value + 1, value - 1) if value > 0 else (value + 1,)
    # Far from 0, one more is the same float.
    return tuple(x for x in (value + 1.0, 2 * value) if x != value)[:1] if isinstance(value, float) else ()


def _statement_changes(node: ast.stmt) -> Iterator[tuple[ast.stmt, str]]:
    is_call = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant | ast.Yield | ast.YieldFrom)
    stores = isinstance(node, ast.Assign) and all(isinstance(t, ast.Attribute | ast.Subscript) for t in node.targets)
    if is_call or stores or isinstance(node, _DELETED):
        yield ast.Pass(), "deleted statement"
    if isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC:
        yield ast.AugAssign(node.target, _ARITHMETIC[type(node.op)](), node.value), "arithmetic"
    if isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield ast.Return(ast.Constant(None)), "return value"


def _written(text: str, tree: ast.Module, change: _Change) -> Mutant | None:
    """The mutant as text, with parentheses where the change needs them; None where it cannot be written in place."""
    node = change.node
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    wanted = ast.dump(_replaced(tree, node, change.new))
    lines = text.splitlines(keepends=True)
    before = "".join(lines[: node.lineno - 1]) + _cut(lines[node.lineno - 1], end=node.col_offset)
    after = _cut(lines[node.end_lineno - 1], start=node.end_col_offset) + "".join(lines[node.end_lineno :])
    code = ast.unparse(ast.fix_missing_locations(change.new))
    for written in (code, f"({code})"):
        mutated = before + written + after
        if _dump(mutated) == wanted:
            diff = list(difflib.unified_diff(text.splitlines(), mutated.splitlines(), lineterm="", n=0))
            return Mutant(node.lineno, change.kind, mutated, "\n".join(diff[3:]))
    return None


def _cut(line: str, start: int = 0, end: int | None = None) -> str:
    """Part of a line by offsets in UTF-8 bytes, which is how `ast` counts."""
    return line.encode()[start:end].decode()


def _dump(text: str) -> str | None:
    try:
        return ast.dump(ast.parse(text))
    except SyntaxError:
        return None


def _replaced(tree: ast.AST, node: ast.AST, new: ast.AST) -> ast.AST:
    """A copy of `tree` with `new` in place of `node`."""

    def copied(value: object) -> object:
        if isinstance(value, list):
            return [copied(item) for item in value]
        return _replaced(value, node, new) if isinstance(value, ast.AST) else value

    return new if tree is node else type(tree)(**{name: copied(value) for name, value in ast.iter_fields(tree)})
