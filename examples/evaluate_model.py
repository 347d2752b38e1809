"""Evaluate a model over seeded episodes, and compare it with another one pair by pair.

Run: python examples/evaluate_model.py [MODEL]      (a folder, a hub id, tiny:NAME or scripted:NAME)
"""

import sys

from rich.console import Console

from gspo_gym import load_config, run_evaluation
from gspo_gym.rollout.comparison import compare, comparison_table
from gspo_gym.rollout.evaluation import evaluation_table

if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "scripted:random"
    config = load_config("quickstart", ["evaluation.seeds='0:50'"])
    results = {name: run_evaluation(config, name) for name in (model, "scripted:reference")}
    console = Console()
    print(evaluation_table(results))
    print(comparison_table(compare(*results.values()), first=model, second="scripted:reference"))
