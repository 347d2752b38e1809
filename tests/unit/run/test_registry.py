"""The runs in a folder: whether they live is exact, two are compared pair by pair, and none that lives is removed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from held_runs import ENDS, held_runs

from gspo_gym.cli.main import main
from gspo_gym.errors import ConfigError, RecordError
from gspo_gym.rollout.evaluation import Evaluation, EvaluationRow, join
from gspo_gym.run.folders import find_run
from gspo_gym.run.process import holding
from gspo_gym.run.recording import RunRecorder
from gspo_gym.run.registry import compare_runs, last_evaluation, list_runs, read_run, remove_run
from gspo_gym.types import Outcome


def make_run(folder: Path, returns: list[float], config: str = "") -> RunRecorder:
    recorder = RunRecorder.create(folder, config)
    recorder.event("evaluation", 0, evaluation([0.0] * len(returns)).to_dict())
    recorder.event("evaluation", 2, evaluation(returns).to_dict())
    return recorder


def evaluation(returns: list[float], env_id: str = "test/Env-v0") -> Evaluation:
    rows = (EvaluationRow(k, value, value > 0, 1, Outcome.TERMINATED) for k, value in enumerate(returns))
    return Evaluation(env_id, tuple(rows), num_retries=1)


def run_command(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["runs", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_status_is_right_however_the_process_left_the_run(tmp_path: Path) -> None:
    with held_runs(tmp_path, 2 * len(ENDS)) as expected:
        assert {run.folder: run.status for run in list_runs(tmp_path)} == expected
        held = [run.folder for run in list_runs(tmp_path) if run.is_held]
        assert len(held) == 4
        for folder in held:
            with pytest.raises(ConfigError, match="already holds a run: process"):
                remove_run(folder)
            assert (folder / "events.jsonl").exists()
    assert {read_run(folder).status for folder in held} == {"crashed"}  # their processes were killed


def test_a_run_that_ended_is_read_from_its_summary_only_if_that_is_of_this_end(tmp_path: Path) -> None:
    recorder = make_run(tmp_path / "a", [1.0, 0.0])
    values = dict.fromkeys(
        ["policy_name", "rescored", "episodes", "best_eval", "gradient_steps", "curve", "initial_eval"]
    )
    summary = {"wall_seconds": 3.0, "sampled_tokens": 7, "trained_tokens": 5, "score": "success_rate", "error": "E"}
    final = {"final_eval": {"score": "mean_return", "mean_return": 0.25}}
    recorder.summary({**values, **summary, **final, "status": "failed", "steps": 4})
    recorder.event("finished", 4, {"status": "failed", "error": "E"})
    run = read_run(tmp_path / "a")
    assert (run.status, run.error, run.step, run.wall_seconds, run.sampled_tokens) == ("failed", "E", 4, 3.0, 7)
    assert (run.score, run.value) == ("mean_return", 0.25)
    recorder.event("resumed", 4)
    recorder.metrics(5, {"loss/total": 0.0})
    run = read_run(tmp_path / "a")
    assert (run.status, run.error, run.step, run.wall_seconds) == ("crashed", None, 5, None)
    assert (run.score, run.value) == ("success_rate", 0.5)  # of the last evaluation, 1 of 2
    recorder.event("finished", 5, {"status": "completed"})  # killed before it could write its summary
    run = read_run(tmp_path / "a")
    assert (run.status, run.step, run.wall_seconds) == ("completed", 5, None)


def test_runs_are_found_by_path_name_and_id_and_in_folders_of_searches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "search/trial_1", "search/trial_2"):
        RunRecorder.create(tmp_path / "runs" / name, "")
    (tmp_path / "runs" / "no run").mkdir()
    monkeypatch.chdir(tmp_path)
    listed = run_command(capsys, "list")
    assert sorted(run["folder"] for run in listed) == ["runs/a", "runs/search/trial_1", "runs/search/trial_2"]
    run_id = next(run["run"] for run in listed if run["folder"] == "runs/search/trial_2")
    for name in ("search/trial_2", "runs/search/trial_2", run_id[:12]):
        assert run_command(capsys, "path", name) == {"path": str(tmp_path / "runs" / "search" / "trial_2")}
    assert run_command(capsys, "show", "a")["status"] == "crashed"
    with pytest.raises(ConfigError, match=r"serch/trial_1: there is no such run.*search/trial_1"):
        find_run("serch/trial_1", Path("runs"))
    assert main(["runs", "list"]) == 0
    assert capsys.readouterr().out.startswith("run ")
    assert main(["runs", "list", "nowhere"]) == 2


def test_runs_are_compared_by_settings_and_seed_by_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = '[model]\nlabel = "{0}"\n[optimizer]\nlr = {1}\nbetas = [0.9, 0.99]\n{2}'
    a, b = make_run(tmp_path / "a", [0.0, 0.5, 1.0], config.format("a", 0.1, "")), tmp_path / "b"
    make_run(b, [1.0, 0.5, 1.5], config.format("b", 0.2, "eps = 1e-8\n"))
    make_run(tmp_path / "c", [1.0], config.format("c", 0.1, ""))
    comparison = compare_runs([a.folder, b, tmp_path / "c"])
    assert comparison.settings == {"optimizer.eps": (None, 1e-8, None), "optimizer.lr": (0.1, 0.2, 0.1)}
    paired, refused = comparison.evaluations
    assert isinstance(paired, dict)
    assert paired["mean_difference"] == (1.0 + 0.0 + 0.5) / 3
    assert (paired["num_pairs"], paired["num_only_second"], paired["num_only_first"]) == (3, 1, 0)
    assert paired["difference_interval"][0] <= 0.5 <= paired["difference_interval"][1]
    assert refused == "compare: evaluations of different seeds; only one side has [1, 2]"
    shown = run_command(capsys, "compare", "a", "b", "--folder", str(tmp_path))
    assert shown["evaluations"] == [paired]
    assert main(["runs", "compare", "a", "b", "--folder", str(tmp_path)]) == 0
    assert "b against a: mean return +0.500 (95%" in capsys.readouterr().out
    assert main(["runs", "compare", "a", "--folder", str(tmp_path)]) == 2


def test_an_evaluation_comes_back_from_its_event_with_its_parts(tmp_path: Path) -> None:
    recorder = RunRecorder.create(tmp_path / "a", "")
    assert last_evaluation(tmp_path / "a") is None
    joined = join([evaluation([0.0, 1.0]), evaluation([0.5, 2.0], "test/Other-v0")])
    recorder.event("evaluation", 0, joined.to_dict())
    assert last_evaluation(tmp_path / "a") == joined


def test_a_run_is_removed_after_a_question(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / name, [1.0])
    words = ["runs", "rm", "a", "--folder", str(tmp_path)]
    assert main(words) == 2  # no terminal to ask at
    assert "add --yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _: "n")
    assert main(words) == 1
    assert (tmp_path / "a").exists()
    monkeypatch.setattr("builtins.input", lambda _: "y")
    assert main(words) == 0
    capsys.readouterr()
    assert run_command(capsys, "rm", "b", "--yes", "--folder", str(tmp_path)) == {"removed": [str(tmp_path / "b")]}
    assert list(tmp_path.iterdir()) == []


def test_a_run_in_use_is_not_removed_whoever_asks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "a", [1.0])
    make_run(tmp_path / "b", [1.0])
    with holding(tmp_path / "b", lambda _: None, has_begun=True):
        assert main(["runs", "rm", "a", "b", "--yes", "--folder", str(tmp_path)]) == 2
    assert "is at work on it" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("words", [["a/."], ["a/checkpoints/.."], ["a", "a", "./a"]])
def test_a_run_is_removed_by_any_name_of_its_folder_and_nothing_that_a_link_in_it_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    make_run(tmp_path / "a", [1.0])
    (tmp_path / "a" / "checkpoints").mkdir()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("kept", encoding="utf-8")
    (tmp_path / "a" / "link").symlink_to(tmp_path / "kept")
    monkeypatch.chdir(tmp_path)
    assert len(run_command(capsys, "rm", *words, "--yes")["removed"]) == 1
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["kept", "kept/file"]


def test_the_run_in_which_one_stands_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "a", [1.0])
    monkeypatch.chdir(tmp_path / "a")
    assert main(["runs", "rm", ".", "--yes"]) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_a_run_is_not_removed_and_not_renamed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "elsewhere", [1.0])
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a").symlink_to(tmp_path / "elsewhere")
    assert main(["runs", "rm", "a", "--yes", "--folder", str(tmp_path / "runs")]) == 2
    assert f"is a link; name the run itself, which is {tmp_path / 'elsewhere'}" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]
    assert (tmp_path / "elsewhere" / "events.jsonl").is_file()


@pytest.mark.parametrize(
    "model", ['source = "a"', 'source = "rl:a:step_000002"', 'base = "{0}/a/checkpoints/step_000002"']
)
def test_a_run_from_whose_checkpoint_another_began_is_removed_only_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    make_run(tmp_path / "a", [1.0])
    (tmp_path / "a" / "checkpoints" / "step_000002").mkdir(parents=True)
    make_run(tmp_path / "b", [1.0], f"[model]\n{model.format(tmp_path)}\n")
    words = ["--yes", "--folder", str(tmp_path)]
    assert main(["runs", "rm", "a", *words]) == 2
    assert f"{tmp_path / 'b'} began from its checkpoint" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert main(["runs", "rm", "a", "b", *words]) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("events.jsonl", '{"kind": "finished"}'),
        ("events.jsonl", '{"kind": "finished", "data": 3}'),
        ("metrics.jsonl", '{"step": []}'),
        ("summary.json", '{"status": "completed", "steps": 4, "final_eval": "none"}'),
        ("summary.json", '{"status": "completed", "steps": 4, "final_eval": {"score": {}}}'),
        ("summary.json", '{"status": "completed", "steps": 4, "wall_seconds": [], "sampled_tokens": "many"}'),
    ],
)
def test_a_run_with_damaged_records_is_listed_and_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str
) -> None:
    make_run(tmp_path / "good", [1.0])
    recorder = make_run(tmp_path / "bad", [1.0])
    if name == "summary.json":
        recorder.event("finished", 4, {"status": "completed"})
    with (tmp_path / "bad" / name).open("a", encoding="utf-8") as file:
        file.write(content + "\n")
    assert main(["runs", "list", str(tmp_path)]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]} == {"good", "bad"}
    assert run_command(capsys, "rm", "bad", "--yes", "--folder", str(tmp_path))["removed"] == [str(tmp_path / "bad")]


def test_runs_whose_evaluations_have_an_unknown_form_are_refused_by_name(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [1.0])
    make_run(tmp_path / "b", [1.0]).event("evaluation", 3, {"mean_return": 0.5})
    with pytest.raises(RecordError, match=r"b: its last evaluation has no known form: KeyError\('rows'\)"):
        compare_runs([tmp_path / "a", tmp_path / "b"])


def test_listing_runs_loads_no_torch() -> None:
    program = "import sys, gspo_gym.run.registry; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
