"""`gspo-gym judge ...`, as somebody types it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from rule_judge import spoken_episode

from gspo_gym.cli.main import main
from gspo_gym.judge.records import read_judgements
from gspo_gym.judge.server import create_fake_judge_app
from gspo_gym.remote.serving import BackgroundServer
from gspo_gym.rollout.episode_files import write_episodes

ROOT = Path(__file__).parents[3]


def test_check_shows_what_a_bundled_rubric_will_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", "check", "support_desk/bundle@v1", "--strict"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"VALID: {ROOT / 'envs' / 'support_desk' / 'rubric.yaml'}"
    assert lines[1] == "event: version v1, weighted_sum, total 0 to 1"
    assert "progress.step   binary     0.5  50.0%  at least 0.5" in lines
    assert lines[-1] == "STRICT: yes"
    assert not any(line.startswith("note:") for line in lines)


def test_check_says_what_may_not_be_meant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        "event:\n"
        "  aggregation: sum\n"
        "  criteria:\n"
        "  - {id: a, description: d, scale: count, weight: 2}\n"
        "  - {id: b, description: d, scale: custom, minimum: -1, maximum: 4}\n"
    )
    assert main(["judge", "check", str(path)]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("note:", "event:"))]
    assert notes == [
        "event: version 1, sum, total -1 and up",
        "note: event: judges agree with themselves better on yes or no: split into binary criteria b",
        "note: event: a count has no upper end, so neither has the total: a",
        "note: event: under sum weights count for nothing",
        "note: event: totals of turns are added up, and no criterion is required, so a turn that does nothing may earn "
        "and longer episodes earn more; make the criterion of progress required",
        "note: there is no outcome part, so judge.reward_blend.outcome must be 0",
    ]


def test_check_of_the_strict_form_fails_with_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "app.json"
    path.write_text('{"version": "1", "goal_text": "g", "criteria": [{"id": "a", "description": "d", "weight": 0.5}]}')
    assert main(["judge", "check", str(path), "--task-app"]) == 0
    assert main(["judge", "check", str(path), "--task-app", "--strict"]) == 1
    out = capsys.readouterr().out
    assert out.endswith("STRICT: no, 1 problems:\n  rubric: weights: expected a sum of 1, got 0.5\n")


def test_check_of_what_is_no_rubric_is_an_error_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "app.json"
    path.write_text('{"criteria": [{"id": "a", "description": "d"}]}')
    assert main(["judge", "check", str(path)]) == 2
    assert "this is a task app's rubric" in capsys.readouterr().err
    assert main(["judge", "check", str(tmp_path / "none.yaml")]) == 2
    assert "there is no such file" in capsys.readouterr().err
    assert main(["judge", "check", "suport_desk/bundle@v1"]) == 2
    assert "did you mean 'support_desk/bundle@v1'" in capsys.readouterr().err


def test_check_finds_ids_in_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine@v2.toml").write_text('[[outcome]]\nid = "a"\ndescription = "d"\nscale = "binary"\n')
    assert main(["judge", "check", "mine@v2", "--folder", str(tmp_path)]) == 0
    assert "outcome: version 1, weighted_sum, total 0 to 1" in capsys.readouterr().out


def in_a_fresh_process(words: Sequence[str], forbidden: Collection[str]) -> None:
    probe = (
        "import sys\nfrom gspo_gym.cli.main import main\n"
        f"assert main(['judge', *{list(words)!r}]) == 0\n"
        f"assert not set({list(forbidden)!r}) & set(sys.modules), set(sys.modules) & set({list(forbidden)!r})\n"
    )
    finished = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False, cwd=ROOT)
    assert finished.returncode == 0, finished.stderr


def test_check_loads_nothing_heavy() -> None:
    in_a_fresh_process(["check", "support_desk/bundle@v1"], ("torch", "transformers", "gymnasium", "openai", "fastapi"))


# --- score and audit: a real HTTP judge, the fake that looks for the words in quotes ----------------------------------

RUBRIC = {
    "event": [{"id": "progress.greets", "description": 'Says "hello".', "scale": "binary"}],
    "outcome": [
        {"id": "outcome.manners", "description": 'Says "thanks".', "scale": "binary", "weight": 3},
        {"id": "process.ending", "description": 'Says "bye".', "scale": "binary", "weight": 1},
    ],
}
SAID = {
    "e0": ["hello", "thanks, bye"],
    "e1": ["hm", "hello, thanks"],
    "e2": ["no"],
}


@pytest.fixture
def run_folder(tmp_path: Path, changed: Any) -> Any:
    """A run whose episodes no judge has scored yet, and whose configuration names the judge at a URL."""

    def make(url: str) -> Path:
        run = tmp_path / "run"
        (run / "episodes").mkdir(parents=True)
        episodes = [spoken_episode(name, said, rewards=[0.5] * len(said)) for name, said in SAID.items()]
        write_episodes(run / "episodes" / "step_000001.jsonl", episodes)
        judge = {
            "reward_blend": {"env": 0.2, "event": 0.4, "outcome": 0.4},
            "options": {
                "event": True,
                "outcome": True,
                "provider": "local",
                "base_url": f"{url}/v1",
                "model": "fake-judge",
                "rubric_overrides": RUBRIC,
            },
        }
        (run / "config.toml").write_text(tomli_w.dumps(changed({}) | {"judge": judge}))
        return run

    return make


def test_score_judges_a_run_again_and_leaves_it_alone(
    tmp_path: Path, run_folder: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with BackgroundServer(create_fake_judge_app()) as server:
        run = run_folder(server.url)
        assert main(["judge", "score", str(run)]) == 0
        before = {path: path.read_bytes() for path in run.rglob("*.jsonl")}
        other = tmp_path / "other.json"
        other.write_text(json.dumps({"outcome": [{"id": "a", "description": 'Says "no".', "scale": "binary"}]}))
        assert main(["judge", "score", str(run), "--rubric", str(other), "--label", "no"]) == 0
    assert {path: path.read_bytes() for path in before} == before
    first = {each.trajectory_id: each for each in read_judgements(run / "judgements-rescored.jsonl")}
    # e0: 0.2 * 1 + 0.4 * (1 + 0) + 0.4 * 1; e1: 0.2 * 1 + 0.4 * (0 + 1) + 0.4 * 3 / 4; e2: 0.2 * 0.5
    assert {name: each.episode_return for name, each in first.items()} == {
        "e0": pytest.approx(1.0),
        "e1": pytest.approx(0.9),
        "e2": pytest.approx(0.1),
    }
    second = {each.trajectory_id: each for each in read_judgements(run / "judgements-no.jsonl")}
    assert second["e2"].blend.event == 0.0  # the other rubric has no such part
    assert {name: each.episode_return for name, each in second.items()} == {
        "e0": pytest.approx(0.2),
        "e1": pytest.approx(0.2),
        "e2": pytest.approx(0.5),
    }
    out = capsys.readouterr().out
    assert "3 of 3 episodes scored" in out
    assert f"written to {run / 'judgements-no.jsonl'}" in out


@pytest.mark.slow
def test_score_and_audit_load_no_torch(tmp_path: Path, run_folder: Any) -> None:
    labels = tmp_path / "labels.jsonl"
    labels.write_text('{"trajectory_id": "e0", "outcome": 1}')
    with BackgroundServer(create_fake_judge_app()) as server:
        run = str(run_folder(server.url))
        in_a_fresh_process(["score", run], ("torch", "transformers", "fastapi"))
        few = ["--attacked-episodes", "0", "--repeats", "0", "--position-episodes", "0"]
        in_a_fresh_process(["audit", run, "--gold", str(labels), *few], ("torch", "transformers", "fastapi"))


def test_score_refuses_to_write_over_and_says_where_a_judge_could_come_from(
    tmp_path: Path, run_folder: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_folder("http://127.0.0.1:9")
    (run / "judgements-rescored.jsonl").write_text("")
    assert main(["judge", "score", str(run)]) == 2
    assert "there is such a file already" in capsys.readouterr().err
    (run / "config.toml").unlink()
    assert main(["judge", "score", str(run), "--label", "new"]) == 2
    assert "name one by --config" in capsys.readouterr().err
    assert main(["judge", "score", str(tmp_path / "nothing")]) == 2
    assert "there is no such run" in capsys.readouterr().err


def test_audit_compares_with_labels_looks_for_biases_and_attacks(
    tmp_path: Path, run_folder: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = tmp_path / "labels.jsonl"
    gold: dict[str, Any] = {
        "e0": {"outcome": {"outcome.manners": 1, "process.ending": 1}, "events": [1, 0]},
        "e1": {"outcome": {"outcome.manners": 1, "process.ending": 1}},  # the judge will not find a "bye"
        "e2": {"outcome": 0},
    }
    labels.write_text("".join(json.dumps({"trajectory_id": name, **label}) + "\n" for name, label in gold.items()))
    report = tmp_path / "report.json"
    with BackgroundServer(create_fake_judge_app()) as server:
        run = run_folder(server.url)
        words = ["judge", "audit", str(run), "--gold", str(labels), "--attacked-episodes", "1", "--json", str(report)]
        assert main(words) == 0
    found = json.loads(report.read_text())
    # judged 1, 3/4, 0; labelled 1, 1, 0
    assert found["outcome"]["mean_absolute_error"] == pytest.approx(0.25 / 3)
    assert found["events"]["equal_fraction"] == 1.0
    assert found["criteria"]["outcome: process.ending"]["equal_fraction"] == 0.5
    assert found["flip_rate"] == 0.0
    assert found["position"]["spread"] == 0.0
    assert found["attacks"]["num_raised"] == 0
    assert found["attacks"]["num_attempts"] >= 60
    assert capsys.readouterr().out.startswith("audit of local:fake-judge: 3 of 3 labelled episodes scored\n")


def test_audit_of_a_judge_that_is_away_scores_nothing_and_says_why(
    tmp_path: Path, run_folder: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gspo_gym.config.build.judge.MAX_ATTEMPTS", 1)
    labels = tmp_path / "labels.jsonl"
    labels.write_text('{"trajectory_id": "e0", "outcome": 1}')
    with BackgroundServer(create_fake_judge_app()) as server:
        run = run_folder(server.url)  # which is gone after this block
    assert main(["judge", "audit", str(run), "--gold", str(labels)]) == 1
    first, reason, *_ = capsys.readouterr().out.splitlines()
    assert first == "audit of local:fake-judge: 0 of 1 labelled episodes scored"
    assert reason.startswith("  unscored 1: ")
