"""A search with a script in the trainer's place: what comes of crashes, deadlines, pruning and interruptions."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gspo_gym.cli.main import main
from gspo_gym.cli.search import study as search_study
from gspo_gym.cli.search.command import TrialResult, read_evaluations, run_search, run_trial
from gspo_gym.cli.search.study import SearchSettings, SearchStudy, load_search
from gspo_gym.config.run_config import load_config
from gspo_gym.errors import ConfigError, MissingExtraError

BASE = """
[model]
base = "tiny:qwen3-64"
label = "base"

[rollout]
env_name = "GuessNumber"
env_config = { style = "terse" }
max_turns = 4
max_output_tokens = 3
max_model_len = 256
episodes_per_batch = 16

[training]
iterations_per_epoch = 2
group_size = 8
batch_size = 16
learning_rate = 1e-3

[evaluation]
seeds = "0:4"
every_n_iters = 1
"""

# Stands in for `python -m gspo_gym.train BASE key=value ...`. Two keys mean something to it: advantages.clip is the
# success rate that it "learns" in 20 iterations, training.keep_last one of the accidents below.
CRASHES, WAITS_IF_BAD, SAYS_NOTHING, WAITS_FOR_ANOTHER, HAS_NO_SUCCESS, NOTHING = range(1, 7)
TRAINER = """
import json, os, pathlib, signal, sys, time
given = dict(text.split("=", 1) for text in sys.argv[2:])
folder = pathlib.Path(json.loads(given["run.folder"])) / json.loads(given["model.label"])
folder.mkdir(parents=True)
goal, accident = float(given["advantages.clip"]), int(given.get("training.keep_last", 0))
print("process", os.getpid(), "threads", os.environ.get("OMP_NUM_THREADS"), flush=True)
if accident == 1:
    sys.exit("out of memory")
while accident == 4 and len([path for path in folder.parent.iterdir() if path.is_dir()]) < 2:
    time.sleep(0.01)
for step in () if accident == 3 else (0, 10, 20):
    score = goal * (step / 20)
    data = {"success_rate": None if accident == 5 else score, "mean_return": -score}
    with open(folder / "events.jsonl", "a") as file:
        file.write(json.dumps({"schema": 1, "kind": "evaluation", "step": step, "data": data}) + "\\n")
    if accident == 2 and step == 10 and goal < 0.5:
        signal.pause()
"""

Make = Callable[..., SearchSettings]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Settings of a search in tmp_path: [search] from keywords, other sections as text, and the [parameters]."""
    (tmp_path / "base.toml").write_text(BASE)
    (tmp_path / "trainer.py").write_text(TRAINER)

    def settings(sections: str = "", *, clip: str = "{ low = 0.1, high = 0.9 }", **given: Any) -> SearchSettings:
        values = {"base": f"{tmp_path}/base.toml", "folder": f"{tmp_path}/runs", "label": "s", "num_trials": 3} | given
        lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        path = tmp_path / "search.toml"
        path.write_text("\n".join(["[search]", *lines, sections, "[parameters]", f"advantages.clip = {clip}"]))
        return load_search(path)

    return settings


def search(settings: SearchSettings, *, resume: bool = False) -> dict[str, Any]:
    trainer = Path(settings.search.folder).parent / "trainer.py"
    return run_search(settings, resume=resume, command=(sys.executable, "-S", str(trainer)), poll_seconds=0.02)


def by_number(board: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(board["trials"], key=lambda row: row["trial"])


def accident(number: int) -> list[str]:
    return [f"training.keep_last={number}"]


GRID = '[sampler]\ntype = "grid"'


def test_the_best_of_the_trials_leads_and_its_configuration_is_ready_to_train(make: Make) -> None:
    settings = make()
    board = search(settings)
    scores = [row["score"] for row in board["trials"]]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 3
    assert scores == [row["parameters"]["advantages.clip"] for row in board["trials"]]  # the trainer reaches its goal
    assert board["best"] == board["trials"][0]["trial"]
    assert board["trials"][0]["evaluations"] == [[0, 0.0], [10, scores[0] / 2], [20, scores[0]]]
    assert json.loads((settings.search_folder / "leaderboard.json").read_text()) == board
    best = load_config(settings.search_folder / "best.toml")
    assert best.advantages.clip == scores[0]
    assert (best.model.label, best.run.folder) == ("s-best", settings.search.folder)


def test_a_search_s_folder_holds_its_settings_its_base_and_a_run_a_trial(make: Make) -> None:
    settings = make(num_trials=1, overrides=["optimizer.eps=1e-7"])
    search(settings)
    names = ["base.toml", "best.toml", "journal.log", "leaderboard.json", "search.toml", "trials"]
    assert sorted(path.name for path in settings.search_folder.iterdir()) == names
    assert sorted(path.name for path in (settings.search_folder / "trials").iterdir()) == [
        "trial_0000",
        "trial_0000.log",
    ]
    assert load_search(settings.search_folder / "search.toml") == settings
    assert (settings.search_folder / "base.toml").read_text() == BASE
    assert load_config(settings.search_folder / "best.toml").optimizer.eps == 1e-7


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("final_success_rate", 0.5),
        ("best_success_rate", 0.5),
        ("final_mean_return", -0.5),
        ("best_mean_return", 0.0),  # before the first iteration
    ],
)
def test_a_metric_is_of_the_last_evaluation_or_of_the_best(make: Make, metric: Any, expected: float) -> None:
    settings = make(GRID, clip="{ choices = [0.5, 0.6] }", num_trials=1, metric=metric)
    assert [row["score"] for row in search(settings)["trials"]] == [expected]


def test_a_crash_is_a_failed_trial_with_its_last_words_and_the_search_goes_on(make: Make) -> None:
    sections = f"{GRID}\n[parameters.training]\nkeep_last = {{ choices = [{CRASHES}, {NOTHING}] }}"
    board = search(make(sections, clip="{ choices = [0.25, 0.75] }", num_trials=4))
    rows = by_number(board)
    assert [row["state"] for row in rows] == ["failed", "failed", "complete", "complete"]
    assert rows[0]["error"].startswith("exit status 1: process ")
    assert rows[0]["error"].endswith(" | out of memory")
    assert board["best"] == 3


def test_a_run_past_its_deadline_is_stopped_and_has_failed(make: Make) -> None:
    settings = make(
        GRID,
        clip="{ choices = [0.25, 0.75] }",
        num_trials=2,
        overrides=accident(WAITS_IF_BAD),
        trial_timeout_seconds=3.0,
    )
    rows = by_number(search(settings))
    assert [row["state"] for row in rows] == ["failed", "complete"]
    assert rows[0]["error"] == "took longer than search.trial_timeout_seconds = 3"
    assert rows[0]["evaluations"] == [[0, 0.0], [10, 0.125]]


def test_a_run_behind_the_median_is_stopped_early(make: Make) -> None:
    # After 10 iterations the first has 0.45; the second has 0.05, less than the median of 0.45, and would never end.
    pruner = '\n[pruner]\ntype = "median"\nnum_startup_trials = 1'
    settings = make(GRID + pruner, clip="{ choices = [0.9, 0.1] }", num_trials=2, overrides=accident(WAITS_IF_BAD))
    rows = by_number(search(settings))
    assert [row["state"] for row in rows] == ["complete", "pruned"]
    assert rows[1]["evaluations"] == [[0, 0.0], [10, 0.05]]


def test_a_run_that_ends_without_an_evaluation_has_failed(make: Make) -> None:
    board = search(make(num_trials=1, overrides=accident(SAYS_NOTHING)))
    assert (board["best"], board["trials"][0]["error"]) == (None, "ended without an evaluation")


def test_a_success_rate_of_an_environment_without_success_is_refused_with_what_to_use(make: Make) -> None:
    board = search(make(num_trials=1, overrides=accident(HAS_NO_SUCCESS)))
    assert board["trials"][0]["error"] == (
        "search.metric: final_success_rate: the environment declares no success; use final_mean_return"
    )


def test_values_that_contradict_each_other_are_a_failed_trial_that_does_not_run(make: Make) -> None:
    # 24 episodes are no groups of 16; either value is valid with the base's 16 episodes and groups of 8
    sections = f"{GRID}\n[parameters.rollout]\nepisodes_per_batch = {{ choices = [16, 24] }}"
    sections += "\n[parameters.training]\ngroup_size = { choices = [8, 16] }"
    board = search(make(sections, clip="{ low = 1, high = 2 }", num_trials=8, overrides=["training.batch_size=8"]))
    wrong = [row for row in by_number(board) if row["state"] == "failed"]
    assert [list(row["parameters"].values()) for row in wrong] == [[24, 16, 1], [24, 16, 2]]
    assert all(row["error"].startswith("not a valid configuration: ") for row in wrong)
    assert not Path(wrong[0]["folder"]).exists()


def test_as_many_runs_as_allowed_share_the_machine(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    settings = make(num_trials=2, max_parallel=2, overrides=accident(WAITS_FOR_ANOTHER), trial_timeout_seconds=20.0)
    assert [row["state"] for row in search(settings)["trials"]] == ["complete", "complete"]
    logs = [path.read_text() for path in (settings.search_folder / "trials").glob("*.log")]
    assert [log.split()[-1] for log in logs] == ["4", "4"]  # threads: 8 cores for 2 runs


def test_the_same_values_are_not_run_again(make: Make) -> None:
    settings = make('[sampler]\ntype = "random"', clip="{ choices = [0.5, 0.6] }", num_trials=5)
    board = search(settings)
    runs = [path.name for path in (settings.search_folder / "trials").iterdir() if path.is_dir()]
    assert len(runs) == len({row["parameters"]["advantages.clip"] for row in board["trials"]}) <= 2
    assert [row["score"] for row in board["trials"]] == [
        row["parameters"]["advantages.clip"] for row in board["trials"]
    ]
    assert {Path(row["folder"]).name for row in board["trials"]} == set(runs)


def test_a_search_goes_on_with_more_trials_and_takes_the_earlier_ones_along(make: Make) -> None:
    first = search(make(num_trials=2))
    with pytest.raises(ConfigError, match=r"is not empty: go on with its search \(--resume\) or choose another"):
        search(make(num_trials=4))
    both = search(make(num_trials=4, max_parallel=2, trial_timeout_seconds=60.0), resume=True)
    assert by_number(both)[:2] == by_number(first)
    assert len({row["score"] for row in both["trials"]}) == 4


def test_a_resumed_search_must_be_the_same_search(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"there is no search to resume \(no search.toml\)"):
        search(make(), resume=True)
    search(make(num_trials=1))
    with pytest.raises(ConfigError, match=r"search.seed: 0 became 1. Start another search instead"):
        search(make(seed=1), resume=True)
    with pytest.raises(ConfigError, match=r"parameters.advantages.clip.high: 0.9 became 0.8"):
        search(make(clip="{ low = 0.1, high = 0.8 }"), resume=True)


def test_an_interrupted_trial_starts_again_with_its_values(make: Make) -> None:
    settings = make(num_trials=2)
    search(settings.model_copy(update={"search": settings.search.model_copy(update={"num_trials": 1})}))
    journal = settings.search_folder / "journal.log"
    begun = SearchStudy(settings, journal).ask()  # and then the machine stops
    assert begun is not None
    board = search(settings, resume=True)
    assert [row["state"] for row in board["trials"]] == ["complete", "complete"]
    assert [row["trial"] for row in by_number(board)] == [0, 2]
    assert by_number(board)[1]["parameters"] == {"advantages.clip": begun.params["advantages.clip"]}


def test_stopping_the_search_stops_its_run(make: Make, tmp_path: Path) -> None:
    async def start_and_cancel() -> None:
        log = tmp_path / "a.log"
        given = ["base", 'model.label="a"', f'run.folder="{tmp_path}"', "advantages.clip=0.1", *accident(WAITS_IF_BAD)]
        task = asyncio.create_task(
            run_trial(
                given,
                run_folder=tmp_path / "a",
                log=log,
                metric="final_success_rate",
                timeout_seconds=None,
                should_stop=lambda evaluations: seen.set() if len(evaluations) == 2 else None,  # type: ignore[func-returns-value,arg-type,return-value]
                num_parallel=1,
                poll_seconds=0.02,
                command=(sys.executable, "-S", str(tmp_path / "trainer.py")),
            )
        )
        await seen.wait()
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()  # as a TaskGroup does whose tasks a signal has cancelled already
        with pytest.raises(asyncio.CancelledError):
            await task
        process_id = int(log.read_text().split()[1])
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)

    make()
    seen = asyncio.Event()
    asyncio.run(start_and_cancel())


def test_a_score_is_of_the_last_evaluation_or_of_the_best() -> None:
    result = TrialResult(((0, 0.1), (10, 0.6), (20, 0.4)), None, False, 1.0)
    assert result.score("final_success_rate") == 0.4
    assert result.score("best_mean_return") == 0.6


def write_evaluations(folder: Path, *evaluations: dict[str, Any]) -> Path:
    lines = [{"schema": 1, "kind": "evaluation", "step": i, "data": data} for i, data in enumerate(evaluations)]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_episodes_that_were_cut_off_undecided_are_no_successes(tmp_path: Path) -> None:
    cut_off = {"success_rate": None, "mean_return": 2.0, "rows": [{"outcome": "max_turns", "success": None}]}
    good = {"success_rate": 0.9, "mean_return": 0.9, "rows": [{"outcome": "terminated", "success": True}]}
    folder = write_evaluations(tmp_path, cut_off, good)
    assert read_evaluations(folder, "final_success_rate", is_over=True) == [(0, 0.0), (1, 0.9)]
    assert read_evaluations(folder, "final_mean_return", is_over=True) == [(0, 2.0), (1, 0.9)]


def test_an_environment_that_ends_an_episode_and_declares_nothing_has_no_success(tmp_path: Path) -> None:
    ended = {"success_rate": None, "mean_return": 2.0, "rows": [{"outcome": "terminated", "success": None}]}
    with pytest.raises(ConfigError, match="use best_mean_return"):
        read_evaluations(write_evaluations(tmp_path, ended), "best_success_rate")


def test_a_folder_without_a_run_has_no_evaluations(tmp_path: Path) -> None:
    assert read_evaluations(tmp_path / "nothing", "final_success_rate") == []


def test_without_optuna_the_error_says_how_to_get_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)  # importing it then raises ImportError
    with pytest.raises(MissingExtraError, match=r"pip install 'gspo-gym\[search\]'"):
        search_study.require_optuna()
    settings = make()
    with pytest.raises(MissingExtraError):
        search(settings)
    assert not settings.search_folder.exists()


@pytest.mark.slow
def test_three_real_runs_are_searched_by_the_command(make: Make, tmp_path: Path, capsys: Any) -> None:
    settings = make(num_trials=3, max_parallel=2)
    assert main(["search", str(tmp_path / "search.toml")]) == 0
    said = capsys.readouterr().out
    assert "The best of many trials is partly the luckiest" in said.replace("\n", " ")
    board = json.loads((settings.search_folder / "leaderboard.json").read_text())
    assert [row["state"] for row in board["trials"]] == ["complete"] * 3
    for row in board["trials"]:
        assert [step for step, _ in row["evaluations"]] == [0, 1, 2]
        config = load_config(Path(row["folder"]) / "config.toml")
        assert config.advantages.clip == row["parameters"]["advantages.clip"]
