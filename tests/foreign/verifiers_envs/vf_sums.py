"""A verifiers environment of one turn: add two numbers. Imported by `verifiers.load_environment` in the tests."""

from __future__ import annotations

from typing import Any

Messages = list[Any]


def right(completion: Messages, answer: str) -> float:
    """Whether the answer is the sum and nothing else."""
    return float(completion[-1].content.strip() == answer)


async def short(completion: Messages) -> float:
    """Whether it has at most four characters."""
    return float(len(completion[-1].content) <= 4)


def raising(completion: Messages) -> float:
    """What verifiers scores with 0, and only logs."""
    raise ZeroDivisionError("division by zero")


def best_of(completions: list[Messages]) -> list[float]:
    """Scores a group."""
    return [1.0 for _ in completions]


def load_environment(num_rows: int = 8, extra: str = "", **kwargs: Any) -> Any:
    """Training rows 0+1, 1+2, ...; evaluation rows 0+0, 1+1, ...; `extra` is one more reward function."""
    import verifiers as vf
    from datasets import Dataset

    def rows(offset: int) -> Any:
        numbers = range(num_rows)
        return Dataset.from_list([{"question": f"{n}+{n + offset}=", "answer": str(n + n + offset)} for n in numbers])

    rubric = vf.Rubric(funcs=[right, short], weights=[1.0, 0.25])
    if extra:
        rubric.add_reward_func({"raising": raising, "best_of": best_of}[extra], weight=0.5)
    return vf.SingleTurnEnv(
        dataset=rows(1), eval_dataset=rows(0), rubric=rubric, system_prompt="Answer with the number.", **kwargs
    )
