"""A verifiers environment of several turns: guess a number from hints. Imported by `verifiers.load_environment`."""

from __future__ import annotations

from typing import Any


def found(state: Any) -> float:
    """Whether the number was said."""
    return float(state["is_found"])


def num_guesses(state: Any) -> float:
    """A metric."""
    return float(len(state["trajectory"]))


def load_environment(high: int = 8, max_turns: int = 4) -> Any:
    """Rows hide the numbers 1 to `high`, each once."""
    import verifiers as vf
    from datasets import Dataset

    class GuessEnv(vf.MultiTurnEnv):  # type: ignore[misc, name-defined]
        async def setup_state(self, state: Any) -> None:
            state["is_found"] = False

        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            said, number = str(messages[-1].content).strip(), int(state["answer"])
            if not said.isdigit():
                return [{"role": "user", "content": "a number"}]
            if int(said) == number:
                state["is_found"] = True
                state["final_env_response"] = [{"role": "user", "content": "found"}]
                return state["final_env_response"]
            return [{"role": "user", "content": "higher" if int(said) < number else "lower"}]

    rows = Dataset.from_list([{"question": f"Guess 1-{high}.", "answer": str(n)} for n in range(1, high + 1)])
    rubric = vf.Rubric(funcs=[found])
    rubric.add_metric(num_guesses)
    return GuessEnv(dataset=rows, eval_dataset=rows, rubric=rubric, max_turns=max_turns)
