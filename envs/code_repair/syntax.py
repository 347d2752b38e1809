"""Parsing and compiling one at a time: CPython 3.11 counts the depth of a syntax tree for the whole process.

Two threads that convert trees at once end in "SystemError: AST constructor recursion depth mismatch" (CPython issue
106905), and episodes run in threads.
"""

from __future__ import annotations

import ast
import threading
from types import CodeType
from typing import Any

_ONE_AT_A_TIME = threading.Lock()


def parse(source: str) -> ast.Module:
    """As `ast.parse`."""
    with _ONE_AT_A_TIME:
        return ast.parse(source)


def literal(text: str) -> Any:
    """As `ast.literal_eval` (Any: any plain value)."""
    with _ONE_AT_A_TIME:
        return ast.literal_eval(text)


def compiled(tree: ast.Module, filename: str) -> CodeType:
    """The code of a module's tree, whose missing positions are filled in."""
    with _ONE_AT_A_TIME:
        code: CodeType = compile(ast.fix_missing_locations(tree), filename, "exec")
        return code
