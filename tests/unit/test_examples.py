"""Every example runs, as a reader would run it: in a process of its own."""

import sys
from pathlib import Path

import programs
import pytest
from tiers import slow_but

ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "write_environment.py": ((), "passed"),
    "tools.py": ((), "passed"),
    # found 1.0 + speed 0.1 x (4 turns - 2 used)
    "custom_reward.py": ((), "6 -> 'Correct.', reward +1.20"),
    "gspo_trainer.py": (("2",), "afterwards: mean return"),
    "dataset_gym.py": (("2",), "training questions: mean reward"),
    "evaluate_model.py": ((), "scripted:reference against scripted:random"),
    "train_from_python.py": (("2",), "final_eval mean return"),
    # the random player answers what it has seen: 0.8 x 1 + 0.2 x 0.250
    "sql_judge.py": ((), "mean return 0.850, of it without the judge 0.250"),
    # always found: 0.2 x 1 + 0.4 x 1 + 0.4 x 1
    "gold_judge.py": ((), "mean return 1.000, of it without the judge 1.000"),
    # It waits for a trainer; tests/contract/test_openai_agent.py is one.
    "openai_agent.py": ((), "python examples/openai_agent.py 8001"),
    "collect_episodes.py": ((), "of 50 episodes succeeded and are in careful.jsonl"),
    "credit_comparison.py": (
        (
            "--num-seeds=1",
            "--plot=comparison.svg",
            "training.iterations_per_epoch=1",
            "rollout.episodes_per_batch=16",
            "warmup.num_episodes=32",
            "warmup.num_epochs=1",
            "evaluation.seeds=0:4",
        ),
        "| GRPO (token ratio), pooled credit | not reached | not reached | 0.000 | 0.000 |",
    ),
}


# By openai_agent.py, and by tests beside the package and in tests/unit/cli/test_gspo_trainer.py.
IMPORTED = {"json_server.py", "verifiers_client.py", "agent.py"}


def test_every_example_is_run_here():
    assert set(EXAMPLES) | IMPORTED == {path.name for path in (ROOT / "examples").glob("*.py")}


@pytest.mark.parametrize(
    "name", slow_but(EXAMPLES, EXAMPLES.keys() - {"credit_comparison.py", "train_from_python.py", "sql_judge.py"})
)
def test_example_runs_and_says_what_it_should(name, tmp_path):
    arguments, expected = EXAMPLES[name]
    config_folder = tmp_path / "configs"
    config_folder.symlink_to(ROOT / "configs")  # runs are written into the working folder, which must not be ours
    done = programs.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_examples_stay_short():
    for path in (ROOT / "examples").glob("*.py"):
        limit = {"write_environment.py": 41, "verifiers_client.py": 180, "agent.py": 26}.get(path.name, 150)
        assert len(path.read_text().splitlines()) < limit, path.name


def test_the_readme_shows_the_example_as_it_is():
    code = (ROOT / "examples" / "write_environment.py").read_text().strip()
    assert f"```python\n{code}\n```" in (ROOT / "README.md").read_text()
