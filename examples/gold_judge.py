"""A judge in a page: a function that reads an episode and scores it; here as gold, and as a judge of its own.

    python examples/gold_judge.py

`rate` is what configs/judge.toml names in [judge.gold]: it is too slow or too dear to train on (so one pretends), and
shows when the judge that is trained on no longer means the same. A judge of yours has the same shape: what it is given
is JSON, what it gives are totals, one a turn if turns are judged, and one for the outcome.
"""

from __future__ import annotations

from typing import Any

from gspo_gym.cli.evaluate import run_evaluation
from gspo_gym.config.run_config import RunConfig


def rate(payload: dict[str, Any]) -> dict[str, Any]:
    """The turn that found the number gets 1, and so does the episode then."""
    messages = payload["messages"]
    is_found = messages[-1]["content"] == "correct"
    num_turns = sum(message["role"] == "assistant" for message in messages)
    return {
        "event_totals": [0.0] * (num_turns - 1) + [float(is_found)],
        "outcome_review": {"total": float(is_found), "summary": "found" if is_found else "not found"},
    }


def main() -> None:
    """Evaluate two hand-written players with the judge: blended returns, and the environment's own apart."""
    config = RunConfig.from_dict(
        {
            "model": {"base": "tiny:qwen3-64", "label": "gold-judge"},
            "rollout": {
                "env_name": "GuessNumber",
                "env_config": {"style": "terse"},
                "max_turns": 4,
                "max_output_tokens": 3,
                "max_model_len": 256,
                "episodes_per_batch": 8,
            },
            "training": {"iterations_per_epoch": 1, "group_size": 8, "batch_size": 8, "learning_rate": 1e-3},
            "evaluation": {"seeds": "0:50"},
            "judge": {
                "enabled": True,
                "reward_blend": {"env": 0.2, "event": 0.4, "outcome": 0.4},
                "options": {
                    "event": True,
                    "outcome": True,
                    "python": "gold_judge:rate",
                    "rubric_id": "guess_number/bundle@v1",
                },
            },
        }
    )
    for player in ("scripted:reference", "scripted:random"):
        print(f"{player}: {run_evaluation(config, player).sentence()}")


if __name__ == "__main__":
    main()
