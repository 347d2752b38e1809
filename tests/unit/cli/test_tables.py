"""What commands print as tables fits 80 columns with names as long as real ones, and no name is cut off."""

from __future__ import annotations

import asyncio
import io
import shutil
from pathlib import Path
from typing import Any

import pytest
from recorded_run import record_run
from rich.console import Console
from rule_judge import RuleJudge, spoken_episode

import gspo_gym
from gspo_gym.base.tables import pairs, table
from gspo_gym.cli.judge import describe_rubric
from gspo_gym.cli.main import main
from gspo_gym.cli.search.command import _table as leaderboard
from gspo_gym.cli.verify import Verification
from gspo_gym.cli.verify import _text as verified
from gspo_gym.config.build.token_audit import PlayerAudit, TokenAudit
from gspo_gym.config.run_config import RunConfig
from gspo_gym.judge.audit import Agreement, AuditReport, _agreement_lines
from gspo_gym.judge.base import Rubrics
from gspo_gym.judge.blend import RewardBlend
from gspo_gym.judge.rescoring import rescore, side_by_side
from gspo_gym.judge.rubric import Criterion, Rubric
from gspo_gym.rollout.evaluation import Evaluation, EvaluationRow, compare, comparison_table, evaluation_table
from gspo_gym.run.report.progress import print_before_after
from gspo_gym.types import Outcome

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct-with-a-long-name"
FOLDER = "/home/somebody/projects/language-models/runs/smollm2-guess-number-lora/checkpoints/step_000030"
ID = "the_answer_names_the_source_of_every_number_in_it_and_says_how_it_was_found"


def evaluation(num_successes: int) -> Evaluation:
    rows = (EvaluationRow(seed, -0.3, seed < num_successes, 3, Outcome.TERMINATED) for seed in range(64))
    return Evaluation("test/Env-v0", tuple(rows))


def report() -> str:
    out = Console(width=80, file=io.StringIO(), record=True)
    before, after = ({"step": step, **evaluation(num).summary()} for step, num in ((0, 3), (1_000_000, 60)))
    print_before_after(out, before, after)
    return out.export_text()


def search() -> str:
    parameters = {f"training.{key}": 0.123456 for key in ("learning_rate", "clip_low", "clip_high", "entropy_coef")}
    parameters |= {"model.base": FOLDER}
    trials = [{"trial": 3, "score": 0.5, "state": "complete", "seconds": 1234.5, "parameters": parameters}]
    return leaderboard({"metric": "final_success_rate", "trials": trials})


def audit() -> str:
    row = Agreement(1_000_000, 0.5, 0.5, 0.5, 0.25, None, None)
    return "\n".join(_agreement_lines(AuditReport("judge", 64, 0, outcome=row, criteria={ID: row})))


def rescored() -> str:
    rubrics = Rubrics(outcome=Rubric((Criterion("kind", "d"),)))
    episode = spoken_episode(f"eval_000000/{FOLDER}", ["y"])
    judge = RuleJudge(lambda trajectory, criterion, place, turn: 1.0)
    done = asyncio.run(rescore(judge, rubrics, [episode], RewardBlend(env=1.0, outcome=0.5)))
    return "\n".join(side_by_side(done))


RUBRIC = Rubric((Criterion(ID, "d", required=True),))
TABLES = {
    "evaluate": (lambda: evaluation_table({FOLDER: evaluation(20), HUB: evaluation(3)}), (FOLDER, HUB)),
    "evaluate --against": (
        lambda: comparison_table(compare(evaluation(3), evaluation(20)), first=FOLDER, second=HUB),
        (FOLDER, HUB),
    ),
    "report of a training": (report, ("after (step 1000000)", "0.938", "0.047")),
    "search": (search, (FOLDER, "0.123")),
    "verify": (lambda: verified(Path(FOLDER), Verification(3, {ID: (1_000_000, 0.1)}), 1e-5), (ID, FOLDER)),
    "env check --model": (
        lambda: str(TokenAudit("Env", HUB, (PlayerAudit(ID, (), 1_000_000, 1_000_000),), (), (), "", ())),
        (ID, "1000000"),
    ),
    "judge audit": (audit, (ID, "1000000")),
    "judge rescore": (rescored, (FOLDER,)),
    "judge rubric": (
        lambda: "\n".join(describe_rubric("outcome", RUBRIC)),
        (ID, "at least 0.5"),
    ),
}


def unbroken(text: str) -> str:
    return "".join(text.split())


def require_fits(text: str, *names: str) -> None:
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert [name for name in names if unbroken(name) not in unbroken(text)] == []


@pytest.mark.parametrize("name", TABLES)
def test_a_table_fits_80_columns_and_has_whole_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    make, names = TABLES[name]
    require_fits(make(), *names)


CONFIG = {
    "model": {"base": "tiny:qwen3-64", "label": "smollm2-guess-number-lora-with-more-than-one-word"},
    "rollout": {"env_name": "GuessNumber", "max_turns": 1, "max_output_tokens": 3, "max_model_len": 256}
    | {"episodes_per_batch": 4},
    "training": {"iterations_per_epoch": 1, "group_size": 4, "batch_size": 4, "learning_rate": 1e-3},
    "evaluation": {"seeds": "0:2"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("projects-about-language-models") / "runs-of-the-last-weeks-of-the-year"
    folder.mkdir()
    config = RunConfig.from_dict({**CONFIG, "run": {"folder": str(folder)}})
    record_run(config)
    shutil.copytree(config.run_folder, folder / f"{config.run_folder.name}-again")
    return folder


@pytest.mark.parametrize(
    "command",
    [
        ["runs", "list", "{2}"],
        ["runs", "show", "{0}"],
        ["runs", "compare", "{0}", "{1}"],
        ["models", "list", "--folder", "{2}"],
    ],
)
def test_what_is_said_of_runs_fits_80_columns(
    command: list[str], runs: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    first, second = sorted(path.name for path in runs.iterdir())
    assert main([word.format(runs / first, runs / second, runs) for word in command]) == 0
    require_fits(capsys.readouterr().out, first, *([] if command[1] == "show" else [second]))


def test_rows_that_fit_stay_beside_those_that_do_not() -> None:
    """20 columns: 6 for the numbers and 2 between leave 12 for names."""
    rows = [("tiny", "0.5"), ("twelve-signs", "10"), ("thirteen-sign", "-1.25")]
    assert table(("model", "return"), rows, width=20).splitlines() == [
        *("model         return", "tiny             0.5", "twelve-signs      10", "thirteen-sign", " " * 15 + "-1.25"),
    ]


def test_wide_letters_count_as_the_two_columns_that_they_take() -> None:
    assert table(("a", "b"), [("模型", "1"), ("abcd", "2")], width=80).splitlines() == ["a     b", "模型  1", "abcd  2"]
    assert pairs([("a", "模型模型")], width=7).splitlines() == ["a", "  模型", "  模型"]


def test_tables_are_laid_out_in_one_place() -> None:
    package = Path(gspo_gym.__file__).parent
    assert [str(path) for path in package.rglob("*.py") if "rich.table" in path.read_text(encoding="utf-8")] == []
