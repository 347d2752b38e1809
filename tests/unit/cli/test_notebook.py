"""A run opened in a notebook, and its episodes in the terminal, from files written here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gspo_gym
from gspo_gym.cli.main import main
from gspo_gym.errors import ConfigError, MissingExtraError, RecordError, UnknownNameError
from gspo_gym.policy.tiny import tiny_tokenizer
from gspo_gym.rollout.comparison import compare
from gspo_gym.rollout.episode_files import write_episodes
from gspo_gym.rollout.evaluation import Evaluation, EvaluationRow
from gspo_gym.types import FinishReason, Message, Outcome, Segment, Task, Trajectory, Turn


def _episode(
    number: int, *, success: bool, reward: float, text: str = "4", ids: tuple[int, int] = (1, 2)
) -> Trajectory:
    return Trajectory(
        trajectory_id=f"step_000001/group_0000/{number}",
        attempt=0,
        task=Task("Sums-v0", number, {}),
        sampling_seed=0,
        segments=(
            Segment(
                token_ids=np.array(ids),
                action_mask=np.array([False, True]),
                rollout_logprobs=np.array([0.0, -1.0]),
                turn_index=np.array([-1, 0]),
                weight_version=np.array([-1, 0]),
            ),
        ),
        turns=(Turn(0, 0, (0, 1), (1, 2), FinishReason.STOP, reward=reward),),
        messages=(Message("user", "2 + 2"), Message("assistant", text)),
        outcome=Outcome.TERMINATED,
        success=success,
        error=None,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "sums"
    (run / "episodes").mkdir(parents=True)
    (run / "config.toml").write_text("# run 0123456789abcdef\n[model]\nlabel = 'sums'\n")
    started = {"schema": 1, "seq": 1, "time": 0.0, "step": 0, "kind": "started", "data": {"run": "0123456789abcdef"}}
    (run / "events.jsonl").write_text(json.dumps(started) + "\n")
    lines = [{"schema": 1, "step": step, "time": 1.0, "loss/total": -0.5 * step} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    episodes = [
        _episode(0, success=False, reward=-1.0, text="5\x1b[2J"),
        _episode(1, success=True, reward=2.0),
        _episode(2, success=True, reward=1.0),
    ]
    write_episodes(run / "episodes" / "step_000001.jsonl.gz", episodes)
    return run


def test_an_opened_run_gives_its_metrics_and_the_episodes_asked_for(folder: Path) -> None:
    run = gspo_gym.open_run("0123", folder=folder.parent)  # the start of its id
    assert run.folder == folder
    assert run.metrics["loss/total"].to_dict() == {1: -0.5, 2: -1.0}
    assert [episode.task.seed for episode in run.episodes(failed=True)] == [0]
    assert [episode.task.seed for episode in run.episodes(step=1, failed=False)] == [1, 2]
    with pytest.raises(RecordError, match="has no episodes 'step_000009'; it has step_000001"):
        run.episodes(step=9)
    with pytest.raises(ConfigError, match="there is no such run"):
        gspo_gym.open_run("sum", folder=folder.parent)


def _evaluation(step: int, num_right: int) -> dict[str, Any]:
    rows = tuple(EvaluationRow(n, float(n < num_right), n < num_right, 1, Outcome.TERMINATED) for n in range(4))
    data = Evaluation("Sums-v0", rows).to_dict()
    return {"schema": 1, "seq": 2 + step, "time": 0.0, "step": step, "kind": "evaluation", "data": data}


@pytest.fixture
def evaluated(folder: Path) -> gspo_gym.Run:
    """The run with evaluations before and after it: 1 and 3 of 4 tasks."""
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(_evaluation(step, right)) + "\n" for step, right in ((0, 1), (2, 3)))
    return gspo_gym.open_run(folder)


def test_evaluations_are_there_by_step_and_compared_in_pairs(evaluated: gspo_gym.Run) -> None:
    before, after = evaluated.evaluations.values()
    assert [(step, one.success_rate) for step, one in evaluated.evaluations.items()] == [(0, 0.25), (2, 0.75)]
    assert compare(before, after).num_only_second == 2
    assert "step 2" in repr(evaluated.evaluations)


def test_the_step_is_a_column_as_well_as_the_index(folder: Path) -> None:
    frame = gspo_gym.open_run(folder).metrics
    assert frame["step"].tolist() == frame.index.tolist() == [1, 2]
    assert frame.sort_values("step", ascending=False).index.tolist() == [2, 1]  # no ambiguous name
    assert frame.loc[2, "loss/total"] == -1.0


def test_a_plot_has_the_score_first_or_the_curves_asked_for(evaluated: gspo_gym.Run) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    (score, hidden) = evaluated.plot().axes
    assert score.get_title() == "success rate, held-out tasks"
    assert score.lines[0].get_xydata().tolist() == [[0.0, 0.25], [2.0, 0.75]]
    assert not hidden.get_visible()
    figure = evaluated.plot("loss/total")
    assert figure.axes[0].lines[0].get_xydata().tolist() == [[1.0, -0.5], [2.0, -1.0]]
    assert figure._repr_svg_().lstrip().startswith("<?xml")
    with pytest.raises(UnknownNameError, match="did you mean 'loss/total'"):
        evaluated.plot("loss/totl")


def test_without_matplotlib_a_plot_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'gspo-gym\[plot\]'"):
        gspo_gym.open_run(folder).plot()


def test_a_notebook_shows_runs_evaluations_and_episodes_as_tables_in_which_no_text_is_markup(
    evaluated: gspo_gym.Run,
) -> None:
    shown = evaluated._repr_html_()
    assert "step 2" in shown
    assert "0.750" in shown
    assert "0.750" in evaluated.evaluations[2]._repr_html_()
    shown = _episode(3, success=True, reward=1.5, text="<b>4</b>\n5")._repr_html_()
    assert "&lt;b&gt;4&lt;/b&gt;<br>5" in shown
    assert "+1.50" in shown
    assert "Sums-v0#3: success, return +1.50" in shown


def test_a_card_is_of_an_environment_or_a_run() -> None:
    card = gspo_gym.card("GuessNumber", num_seeds=2)
    assert card.startswith("# gspo_gym/GuessNumber-v0\n")
    assert card._repr_markdown_() == card
    with pytest.raises(UnknownNameError, match="expected an environment or a run's model"):
        gspo_gym.card("tiny:qwen3-64")
    with pytest.raises(
        UnknownNameError, match=r"no environment 'Wordl'; did you mean 'Wordle'\?; Wordl: there is no such run"
    ):
        gspo_gym.card("Wordl")


def test_without_pandas_the_metrics_are_dictionaries(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)  # what makes an import fail
    lines = gspo_gym.open_run(folder).metrics
    assert [(line["step"], line["loss/total"]) for line in lines] == [(1, -0.5), (2, -1.0)]


def test_sampled_tokens_are_green_in_a_terminal_and_steps_and_tasks_can_be_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens of the tiny tokenizer are bytes: the environment wrote a "q", the policy a "z"."""
    tiny_tokenizer().save_pretrained(folder / "checkpoints" / "step_000002")
    played = [_episode(7, success=False, reward=-1.0, ids=(ord("q"), ord("z")))]
    write_episodes(folder / "episodes" / "step_000002.jsonl.gz", [*played, _episode(8, success=True, reward=1.0)])
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", "100")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["episodes", str(folder), "--step", "2", "--task", "Sums-v0#7"]) == 0
    shown = capsys.readouterr().out
    # ANSI: 2 is dim, 1;32 is bold green, 0 ends it.
    assert "\x1b[2mq\x1b[0m\x1b[1;32mz\x1b[0m" in shown
    assert "step_000001/group_0000/8" not in shown
    assert main(["episodes", str(folder), "--step", "1", "--task", "Sums-v0#7"]) == 1


def test_episodes_are_printed_best_first_and_their_control_characters_do_not_act(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["episodes", str(folder), "--best", "--limit", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("return +2.00") < shown.index("return +1.00")
    assert "2 of 3 episodes" in shown
    assert main(["episodes", str(folder), "--failed"]) == 0
    assert "5⟨001b⟩[2J" in capsys.readouterr().out
    assert main(["episodes", str(folder), "--task", "Sums-v0#7"]) == 1


def test_a_run_that_has_only_evaluations_shows_the_last_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a run does that is in its first step, or was stopped there."""
    (folder / "episodes" / "step_000001.jsonl.gz").unlink()
    for step, reward in ((0, 3.0), (5, 4.0)):
        episodes = [_episode(step, success=True, reward=reward)]
        write_episodes(folder / "episodes" / f"eval_{step:06d}.jsonl.gz", episodes)
    assert main(["episodes", str(folder), "--messages"]) == 0
    shown = capsys.readouterr().out
    assert "return +4.00" in shown
    assert "return +3.00" not in shown
    with pytest.raises(RecordError, match="has no episodes 'step_000009'; it has eval_000000, eval_000005"):
        gspo_gym.open_run(folder).episodes(step=9)
