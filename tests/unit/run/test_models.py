"""The models of runs: which checkpoint a name means, and a card whose numbers are those of the run's records."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from gspo_gym.errors import CheckpointError, UnknownNameError
from gspo_gym.learning.saved import copy_state
from gspo_gym.policy.checkpoints import CheckpointStore
from gspo_gym.policy.export import Weights, export
from gspo_gym.policy.load import Policy, load_policy
from gspo_gym.policy.manifest import Origin
from gspo_gym.rollout.evaluation import EvaluationRow, PlayedRow, evaluation_of_rows
from gspo_gym.run.models import find_model, lineage_in_card, list_models, model_card
from gspo_gym.run.recording import RunRecorder
from gspo_gym.types import Outcome

ENV = "gspo_gym/GuessNumber-v0"
CONFIG = """
[run]
seed = 4
[model]
base = "tiny:qwen3-64"
label = "quick"
dtype = "float32"
[rollout]
env_name = "GuessNumber"
env_config = { style = "terse", low = 1, high = 4 }
[training]
learning_rate = 0.002
"""


class Learner:
    """Nothing to resume."""

    def copy_state(self) -> Callable[[Path], None]:
        return copy_state({})

    def counters(self) -> dict[str, int]:
        return {}


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy("tiny:qwen3-64", seed=3)


def evaluation(returns: list[float]) -> Mapping[str, Any]:
    """An evaluation with these returns on the seeds from 0; above 0.5 is a success."""
    rows = [EvaluationRow(seed, r, r > 0.5, 2, Outcome.TERMINATED) for seed, r in enumerate(returns)]
    made = evaluation_of_rows([ENV], range(len(rows)), [PlayedRow(ENV, row, 0) for row in rows])
    assert made is not None
    return made.to_dict()


@pytest.fixture
def runs(tmp_path: Path, policy: Policy) -> Path:
    """A folder with the run "quick": checkpoints of steps 2, 4, 6 and 8, all but the last evaluated, 4 and 6 equal.

    By default the newest two and the best are kept: 2 is gone.
    """
    folder = tmp_path / "quick"
    recorder = RunRecorder.create(folder, CONFIG)
    run_id = recorder.folder.joinpath("config.toml").read_text().split()[2]
    store = CheckpointStore(folder / "checkpoints", run_id=run_id)
    for step, returns in [(2, [1.0, 0.0, 0.0]), (4, [1.0, 0.9, 0.0]), (6, [0.9, 1.0, 0.0]), (8, None)]:
        numbers = None
        if returns is not None:
            made = evaluation(returns)
            recorder.event("evaluation", step, made)
            numbers = {key: made[key] for key in ("score", "success_rate", "mean_return")}
        store.write(store.copy(step, policy=policy, learner=Learner(), trainer_state={}, evaluation=numbers))
    return tmp_path


def test_a_run_means_its_newest_checkpoint_and_after_the_sign_the_best_or_that_of_a_step(runs: Path) -> None:
    steps = {name: find_model(name, runs=runs).step for name in ("quick", "quick@latest", "quick@best", "quick@6")}
    assert steps == {"quick": 8, "quick@latest": 8, "quick@best": 4, "quick@6": 6}
    assert find_model(str(runs / "quick"), runs=Path("nowhere")).step == 8
    model = find_model(str(runs / "quick" / "checkpoints" / "step_000006"))
    assert (model.step, model.name, model.run) == (6, "quick@6", runs / "quick")
    assert find_model("tiny:qwen3-64@3").base == "tiny:qwen3-64@3"


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("quick@2", UnknownNameError, r"expected latest, best or a step with a checkpoint, which are \[4, 6, 8\]"),
        ("quick@newest", UnknownNameError, "expected latest, best or a step"),
        ("quikc", UnknownNameError, "did you mean 'quick'"),
        ("quikc@best", UnknownNameError, "did you mean 'quick'"),
        ("no/such/folder", UnknownNameError, "does not look like one of the hub's ids"),
    ],
)
def test_what_is_not_there_is_refused_by_what_is(runs: Path, name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        find_model(name, runs=runs)


def test_a_run_without_an_evaluated_checkpoint_has_no_best(runs: Path) -> None:
    for step in (4, 6):
        (runs / "quick" / "checkpoints" / f"step_{step:06d}" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"none of its checkpoints \(steps \[8\]\) was evaluated; take @8"):
        find_model("quick@best", runs=runs)
    (runs / "quick" / "checkpoints" / "step_000008" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no complete checkpoint yet"):
        find_model("quick", runs=runs)


def test_all_complete_checkpoints_are_listed_with_their_evaluations(runs: Path) -> None:
    (runs / "empty").mkdir()
    listed = [(model.name, model.to_json(), marks) for model, marks in list_models(runs)]
    assert [(name, marks) for name, _, marks in listed] == [
        ("quick@4", {"best"}),
        ("quick@6", set()),
        ("quick@8", {"latest"}),
    ]
    about = listed[0][1]
    assert (about["base"], about["layout"], about["adapter_base"]) == ("tiny:qwen3-64", "transformers", None)
    assert about["evaluation"]["success_rate"] == 2 / 3
    assert "rows" not in about["evaluation"]
    assert listed[2][1]["evaluation"] is None


def test_the_cards_numbers_are_those_of_the_evaluation_as_the_hubs_own_reader_reads_them(runs: Path) -> None:
    model = find_model("quick@best", runs=runs)
    export(model.base, runs / "out", describe=lambda weights: model_card(model, weights, version="1.2"))
    card = ModelCard.load(runs / "out" / "README.md")
    results = {result.metric_type: result for result in card.data.eval_results}
    # From the line as it was recorded, and by hand: 2 of 3 succeeded, with returns of 1, 0.9 and 0.
    (event,) = (
        e for e in map(json.loads, (runs / "quick" / "events.jsonl").read_text().splitlines()) if e["step"] == 4
    )
    recorded = event["data"]
    assert results["success_rate"].metric_value == recorded["success_rate"] == 2 / 3
    assert math.isclose(results["mean_return"].metric_value, 1.9 / 3)
    assert results["success_rate"].metric_args == {"num_episodes": 3, "interval_95": recorded["success_interval"]}
    assert results["mean_return"].metric_args["interval_95"] == recorded["mean_return_interval"]
    assert results["success_rate"].dataset_args == {"seeds": "0:3"}
    assert card.data.library_name == "transformers"
    assert "base_model" not in card.data.to_dict()  # a tiny model is none of the hub's
    # Wilson's interval for 2 of 3 at z = 1.96 (E. B. Wilson, 1927).
    z, p, n = 1.959963984540054, 2 / 3, 3
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    low, high = f"{middle - half:.6g}", f"{middle + half:.6g}"
    assert f"| {ENV} | success_rate | 0.666667 | {low} to {high} | 3 episodes, seeds 0:3 |" in card.text


def test_the_card_says_from_what_a_distilled_model_learned(runs: Path) -> None:
    model, weights = find_model("quick@best", runs=runs), Weights("transformers", None, None, {})
    card = model_card(model, weights, version="1.2")
    assert "distillation" not in card
    assert yaml.safe_load(card.split("---\n")[1])["tags"] == ["gspo-gym", "gspo", "reinforcement-learning"]
    assert "A language model trained with GSPO by gspo-gym" in card
    with (runs / "quick" / "config.toml").open("a") as file:
        file.write('\n[distillation]\nteacher = "self"\nfeedback = "sibling"\nreward = false\n')
    card = model_card(model, weights, version="1.2")
    for row in ("distillation.teacher` | self", "distillation.feedback` | sibling", "distillation.reward` | False"):
        assert row in card
    assert yaml.safe_load(card.split("---\n")[1])["tags"] == ["gspo-gym", "distillation"]
    assert "A language model distilled by gspo-gym" in card


def test_the_card_tells_the_lineage_and_the_digests(runs: Path) -> None:
    model = find_model("quick@4", runs=runs)
    export(model.base, runs / "out", describe=lambda weights: model_card(model, weights, version="1.2"))
    text = (runs / "out" / "README.md").read_text()
    run_id = (runs / "quick" / "config.toml").read_text().split()[2]
    sums = (runs / "out" / "SHA256SUMS").read_text()
    digest = next(line.split()[0] for line in sums.splitlines() if line.endswith("  model.safetensors"))
    assert f"run `quick` (id {run_id}), checkpoint of step 4" in text
    assert text.count(digest) == 2  # in the checkpoint, and here: a full model is copied
    assert "| `training.learning_rate` | 0.002 |" in text
    assert "on `GuessNumber` with style = 'terse', low = 1, high = 4." in text
    never = find_model("quick@8", runs=runs)
    export(never.base, runs / "never", describe=lambda weights: model_card(never, weights, version="1.2"))
    card = ModelCard.load(runs / "never" / "README.md")
    assert card.data.eval_results is None
    assert "Evaluation" not in card.text


def test_the_card_names_the_run_that_this_one_continues_and_what_made_it(runs: Path, policy: Policy) -> None:
    run_id = (runs / "quick" / "config.toml").read_text().split()[2]
    origin = Origin(parent={"run": "abc", "step": 7}, config="c0ffee", packages={"torch": "2.13"}, git="f00d-dirty")
    store = CheckpointStore(runs / "quick" / "checkpoints", run_id=run_id, origin=origin)
    store.save(10, policy=policy, learner=Learner(), trainer_state={})
    model = find_model(run_id[:6], runs=runs)  # a run is also found by its id
    weights = Weights("transformers", None, None, {})
    lineage = model_card(model, weights, version="1.2").partition("## Lineage")[2]
    for told in (f"(id {run_id})", "step 7 of run abc", "sha256 c0ffee", "revision: f00d-dirty", "torch 2.13"):
        assert told in lineage


def test_listing_checkpoints_imports_nothing_that_computes(runs: Path) -> None:
    heavy = ("torch", "transformers", "peft", "gymnasium", "gspo_gym.rollout.evaluation")
    program = f"""
import sys
from gspo_gym.cli.main import main
status = main(["models", "list", "--folder", {str(runs)!r}])
print(*[name for name in {heavy} if name in sys.modules])
sys.exit(status)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    *table, loaded = ended.stdout.splitlines()
    assert loaded == ""
    assert sum("quick@" in line for line in table) == 3


def test_only_the_lineage_in_a_card_says_that_a_run_trained_the_model(runs: Path, tmp_path: Path) -> None:
    model = find_model("quick@6", runs=runs)
    run_id = (runs / "quick" / "config.toml").read_text().split()[2]
    out = tmp_path / "of a run"
    export(model.base, out, describe=lambda weights: model_card(model, weights, version="1"))
    assert lineage_in_card(out) == f"run `quick` (id {run_id}), checkpoint of step 6"
    other = tmp_path / "of no run"
    foreign = find_model("tiny:qwen3-64@3")
    export(foreign.base, other, describe=lambda weights: model_card(foreign, weights, version="1"))
    assert lineage_in_card(other) is None
    (other / "README.md").write_text("# A model\n\nTrained with GSPO by gspo-gym, it says. run `quick`\n")
    assert lineage_in_card(other) is None
    (other / "README.md").unlink()
    assert lineage_in_card(other) is None
