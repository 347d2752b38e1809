"""A judge that is a function: did the work end with an answer, and is the answer what the database said?

    python examples/sql_judge.py      # as the judge, on two hand-written players

It scores the criteria of configs/rubrics/sql_analyst.yaml by their ids. It looks at tool calls that were really made,
and not at words that look like one; configs/sql_analyst_judged.toml has it in [judge.gold], to watch a judge that does.
"""

from __future__ import annotations

import json
from typing import Any

from gspo_gym.cli.evaluate import run_evaluation
from gspo_gym.config.run_config import RunConfig, load_sections


def rate(payload: dict[str, Any]) -> dict[str, Any]:
    """The review of the outcome: both criteria with 0 or 1, and their mean, as the rubric weighs them."""
    answers: list[str] = []
    seen: list[str] = []
    for message in payload["messages"]:
        for call in message.get("tool_calls", ()):
            if call["function"]["name"] == "answer":
                answers.append(str(json.loads(call["function"]["arguments"]).get("value")))
        if message["role"] == "tool" and message.get("name") == "query":
            seen.append(message["content"])
    scores = {
        "outcome.answered": float(bool(answers)),
        "reasoning.evidence": float(any(answer in seen for answer in answers)),
    }
    return {
        "outcome_review": {
            "criteria": {id_: {"score": score} for id_, score in scores.items()},
            "total": sum(scores.values()) / len(scores),
        }
    }


def main() -> None:
    """Evaluate two hand-written players: blended returns, and the environment's own apart."""
    sections = load_sections("configs/sql_analyst_judged.toml")
    rubric_file = sections["judge"]["options"]["rubric_id"]
    sections["judge"]["options"] = {"outcome": True, "python": "sql_judge:rate", "rubric_id": rubric_file}
    del sections["judge"]["gold"]  # it is the judge now
    config = RunConfig.from_dict(sections)
    for player in ("scripted:reference", "scripted:random"):
        print(f"{player}: {run_evaluation(config, player).sentence()}")


if __name__ == "__main__":
    main()
