"""A verifiers environment with Python tools: a product that needs a calculator. Imported by `load_environment`."""

from __future__ import annotations

from typing import Any


def multiply(a: int, b: int) -> int:
    """Multiplies two whole numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a * b


def divide(a: int, b: int) -> float:
    """Divides two whole numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a / b


def right(completion: list[Any], answer: str) -> float:
    """Whether the last message is the product."""
    return float(str(completion[-1].content).strip() == answer)


def load_environment(max_turns: int = 4) -> Any:
    """Rows ask for n * (n + 1)."""
    import verifiers as vf
    from datasets import Dataset

    numbers = range(101, 109)
    rows = Dataset.from_list([{"question": f"{n} * {n + 1}?", "answer": str(n * (n + 1))} for n in numbers])
    return vf.ToolEnv(
        tools=[multiply, divide], dataset=rows, eval_dataset=rows, rubric=vf.Rubric(funcs=[right]), max_turns=max_turns
    )
