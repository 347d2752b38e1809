"""A verifiers environment whose data are built when they are first asked for. Imported by `load_environment`."""

from __future__ import annotations

from typing import Any

BUILT: list[str] = []


def load_environment(eval_fails: bool = False) -> Any:
    """Rows ask for n + 1; the evaluation rows fail to build where asked for."""
    import verifiers as vf
    from datasets import Dataset

    def rows_of(side: str, numbers: range) -> Any:
        BUILT.append(side)
        if eval_fails and side == "eval":
            raise OSError("the hub is down")
        return Dataset.from_list([{"question": f"{n} + 1?", "answer": str(n + 1)} for n in numbers])

    def right(completion: list[Any], answer: str) -> float:
        return float(str(completion[-1].content).strip() == answer)

    return vf.SingleTurnEnv(
        dataset=lambda: rows_of("train", range(10, 20)),
        eval_dataset=lambda: rows_of("eval", range(5)),
        rubric=vf.Rubric(funcs=[right]),
    )
