"""What a run prints at its end."""

import io
import shlex
import sys
import threading
import tomllib

import numpy as np
import pytest
from rich.console import Console

from gspo_gym.rollout.evaluation import Evaluation, EvaluationRow, evaluation_table, join
from gspo_gym.rollout.ledger import Dispatched, Disposition, Ledger, Terminal
from gspo_gym.run.process import Phases
from gspo_gym.run.report.progress import (
    LiveProgress,
    QuietProgress,
    _what_was_not_kept,
    _why_it_stopped,
    counting,
    next_steps,
    print_before_after,
    print_episode,
    telling,
    text_curve,
)
from gspo_gym.types import FinishReason, Message, Outcome, Segment, Task, Trajectory, Turn


def console(*, is_terminal=False):
    return Console(record=True, width=120, force_terminal=is_terminal, file=io.StringIO())


def evaluation(*, successes=0, failures=0, silent=0, env_id="test/Env-v0"):
    ends = [True] * successes + [False] * failures + [None] * silent
    rows = (EvaluationRow(seed, 1.0, success, 1, Outcome.TERMINATED) for seed, success in enumerate(ends))
    return Evaluation(env_id, tuple(rows))


def make_trajectory():
    mask = np.array([False, True, False, True])
    segment = Segment(np.arange(4), mask, np.zeros(4), np.where(mask, [-1, 0, -1, 1], -1), np.where(mask, 0, -1))
    turns = tuple(
        Turn(k, 0, (2 * k, 2 * k + 1), (2 * k + 1, 2 * k + 2), FinishReason.STOP, reward=reward)
        for k, reward in enumerate((-0.2, 1.0))
    )
    said = (("user", "Guess"), ("assistant", "3"), ("user", "higher"), ("assistant", "6"), ("user", "correct"))
    messages = tuple(Message(role, text) for role, text in said)
    task = Task("test/Env-v0", 7)
    return Trajectory("t", 0, task, 1, (segment,), turns, messages, Outcome.TERMINATED, success=True)


def test_an_episode_shows_each_answer_with_its_own_reward_and_the_return():
    out = console()
    print_episode(out, "after", make_trajectory())
    text = out.export_text()
    assert "after: test/Env-v0#7" in text
    lines = [line.strip("│ \n") for line in text.splitlines()]
    assert lines[2] == "assistant  3   [-0.20]"
    assert lines[4] == "assistant  6   [+1.00]"
    assert lines[6] == "success, return +0.80"  # -0.2 + 1.0


def test_before_and_after_stand_beside_each_other_with_intervals():
    out = console()
    before = {"step": 0, **evaluation(successes=5, failures=5).summary()}
    after = {"step": 40, **evaluation(successes=10, failures=0).summary()}
    print_before_after(out, before, after)
    text = out.export_text()
    # Wilson 95%: 5 of 10 is 0.237 to 0.763; 10 of 10 is 0.722 to 1 (Wikipedia's closed form: 1 / (1 + z^2/n) = 0.7225)
    assert "0.500  (95%: 0.237 to 0.763)" in text
    assert "1.000  (95%: 0.722 to 1.000)" in text


def test_the_interval_of_a_success_rate_is_of_the_episodes_that_it_is_a_rate_of():
    out = console()
    # 10 episodes of an environment that declares success, beside 90 of one that does not: the rate is over 10
    both = join([evaluation(successes=5, failures=5), evaluation(silent=90, env_id="test/Silent-v0")])
    print_before_after(out, {"step": 0, **both.summary()}, {"step": 40, **both.summary()})
    assert "0.500  (95%: 0.237 to 0.763)" in out.export_text()


def test_a_long_curve_is_averaged_into_its_columns():
    # 8 values in 4 columns: means 0, 1, 0, 1; in one row of full height these are empty and full blocks
    assert text_curve([0, 0, 1, 1, 0, 0, 1, 1], width=4, height=1) == [" 1.00 | █ █"]


def test_values_off_the_axis_are_drawn_at_its_edge():
    assert text_curve([-5.0, 5.0], height=1) == [" 1.00 | █"]


def test_progress_is_live_only_in_a_terminal():
    with telling(console()) as lines, telling(console(is_terminal=True)) as live, telling(None) as nobody:
        assert isinstance(lines, QuietProgress)
        assert isinstance(live, LiveProgress)
        nobody.note("is told")


def test_a_log_has_a_line_every_thirty_seconds_whatever_is_being_done():
    now, lines = [0.0], []

    def wait(seconds):  # the time passes at once; after two minutes the run is over
        now[0] += seconds
        return now[0] > 120.0

    progress = QuietProgress(lambda text: lines.append((now[0], text)), wait=wait, clock=lambda: now[0])
    progress._beat()  # what the thread does
    assert [at for at, _ in lines] == [30.0, 60.0, 90.0, 120.0]
    assert lines[0][1] == "getting ready (30 s since the start)"


def test_a_line_says_the_latest_step_and_is_written_when_none_was_for_thirty_seconds():
    now, lines = [0.0], []
    progress = QuietProgress(lines.append, clock=lambda: now[0])
    progress.started(10)
    for step in range(1, 8):
        now[0] = 8.0 * step
        progress.stepped(step, {"rollout/success_rate": 0.25})
        if step == 5:
            progress.note("an evaluation")
    # steps end at 8, 16, 24, 32 (the first after 30), 40, where a note starts the 30 s anew
    assert lines == ["training for 10 steps", "step 4/10: success 25%, left 0:48", "an evaluation"]


def test_a_line_names_the_phase_with_what_is_done_of_it_and_the_time_that_is_left():
    now, lines = [0.0], []
    phases = Phases(clock=lambda: now[0])
    progress = QuietProgress(lines.append, clock=lambda: now[0], phases=phases)

    def beat(at):
        now[0] = at
        ends = iter([False, True])
        progress._wait = lambda _: next(ends)
        progress._beat()

    phases.enter("warming up", total=96, unit="demonstrations")
    for _ in range(40):
        phases.advance("warming up")
        phases.advance("collecting")  # of another phase: it does not count
    beat(40.0)  # 40 in 40 s: the other 56 take 56 s
    phases.enter("warming up")
    phases.count(3, 12, "batches")
    beat(70.0)  # 3 in 30 s: 9 take 90 s
    progress.started(3)
    phases.enter("evaluating", total=64)
    for _ in range(12):
        phases.advance("evaluating")
    beat(100.0)  # 12 in 30 s: 52 take 130 s
    phases.enter("collecting", total=96)
    beat(130.0)  # none is over: it may take any time
    phases.enter("learning")
    phases.count(3, 4, "batches")
    beat(190.0)  # 3 in 60 s: 20 s
    progress.stepped(1, {})
    now[0] = 240.0
    progress.stepped(2, {"rollout/success_rate": 0.25})
    phases.enter("saving")
    beat(280.0)
    assert lines == [
        "warming up 40 of 96 demonstrations, 0:56 left (40 s since the start)",
        "warming up 3 of 12 batches, 1:30 left (70 s since the start)",
        "training for 3 steps",
        "before step 1/3: evaluating 12 of 64, 2:10 left (100 s since the start)",
        "step 1/3: playing 0 of 96 (130 s since the start)",
        "step 1/3: learning 3 of 4 batches, 0:20 left (190 s since the start)",
        "step 2/3: success 25%, left 0:50",  # one step in 50 s, and one is left
        "after step 2/3: saving; the run: 0:50 left (280 s since the start)",
    ]


def test_a_resumed_run_says_at_which_step_it_is():
    now, lines = [0.0], []
    progress = QuietProgress(lines.append, clock=lambda: now[0], wait=lambda _: now[0] > 40.0)
    progress.started(9, 4)
    phases = progress._pace._phases
    phases.enter("collecting", total=8)
    now[0] = 30.0
    progress._write = lambda text: (lines.append(text), now.__setitem__(0, 50.0))
    progress._beat()
    assert lines == ["training for 9 steps", "step 5/9: playing 0 of 8 (30 s since the start)"]


def test_lines_come_from_a_thread_while_the_run_holds_up_its_own():
    written = threading.Event()
    progress = QuietProgress(lambda text: written.set(), seconds=0.0)
    with progress.alive():
        assert written.wait(timeout=60.0)  # this thread does nothing else
    assert threading.active_count() == 1 or "gspo-gym-progress" not in [t.name for t in threading.enumerate()]


def test_a_log_has_a_line_of_the_episodes_that_are_over_at_most_every_five_seconds():
    now, text = [0.0], io.StringIO()
    log = Console(file=text, force_terminal=False)
    with counting(log, 10, done=3, clock=lambda: now[0]) as count:
        for second in range(1, 8):
            now[0] = 1.5 * second
            count()
    # They end at 1.5, 3, 4.5, 6 (the first from 5 on; 7 are over then), 7.5, 9 and 10.5, not 5 s after 6.
    # 4 new ones in 6 s: the last 3 take 4.5.
    assert text.getvalue() == "7 of 10 episodes are over, 0:04 left\n"


def test_a_log_has_a_line_every_thirty_seconds_in_which_no_episode_ends():
    now, text = [0.0], io.StringIO()
    has_ended = threading.Event()

    def wait(seconds):  # of the thread: a hundred seconds pass at once, and then the command is over
        now[0] += seconds
        return now[0] > 100.0 and (has_ended.set() or True)

    with counting(Console(file=text, force_terminal=False), 10, done=3, wait=wait, clock=lambda: now[0]):
        assert has_ended.wait(timeout=60.0)
    told = [f"3 of 10 episodes are over ({second} s since the start)" for second in (30, 60, 90)]
    assert text.getvalue().splitlines() == told


def test_a_terminal_has_a_bar_of_the_episodes_that_are_over():
    text = io.StringIO()
    with counting(Console(file=text, force_terminal=True, width=80), 4, done=1) as count:
        for _ in range(3):
            count()
    assert "4/4" in text.getvalue()


CONFIG = """
[run]
seed = 4
[rollout]
env_name = "GuessNumber"
env_config = { low = 1, high = 4, style = "terse" }
[training]
num_epochs = 1
iterations_per_epoch = 320
stop_at_success_rate = 0.97
"""


def test_a_report_says_why_a_run_stopped_before_its_last_step():
    config = tomllib.loads(CONFIG)
    expected = "stopped after 180 of 320 steps: its evaluation reached training.stop_at_success_rate = 0.97"
    assert _why_it_stopped({"steps": 180}, config) == expected
    assert _why_it_stopped({"steps": 320}, config) is None


def test_the_commands_that_come_next_name_what_is_there(tmp_path):
    folder = tmp_path / "my runs" / "quick"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG)
    text = [shlex.join(command) for command, _ in next_steps(folder)]
    assert not any(" evaluate " in line for line in text)  # there is no checkpoint to evaluate
    assert any(line.endswith(f"report '{folder}' --open") for line in text)
    options = """--option=low=1 --option=high=4 '--option=style="terse"'"""
    assert any(line.endswith(f"env play GuessNumber --mask {options}") for line in text)
    assert any(f"doctor '{folder}'" in line for line in text)
    assert any("run.seed=5 model.label=quick-seed5" in line for line in text)
    (folder / "checkpoints" / "step_000180").mkdir()
    assert any(f"--model '{folder}'" in shlex.join(command) for command, _ in next_steps(folder))


def programs_by_path(monkeypatch, tmp_path, *, names, path):
    """Return the words that start the first next command, with scripts of these names beside the interpreter."""
    scripts = tmp_path / ".venv" / "bin"
    scripts.mkdir(parents=True)
    for name in ("python", *names):
        (scripts / name).write_text("#!/bin/sh\n")
        (scripts / name).chmod(0o755)
    folder = tmp_path / "runs" / "quick"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG)
    monkeypatch.setattr(sys, "executable", str(scripts / "python"))
    monkeypatch.setenv("PATH", path.format(scripts=scripts))
    monkeypatch.chdir(tmp_path)
    command, _ = next_steps(folder)[0]
    return command[: command.index("report")], command[-2]


@pytest.mark.parametrize(
    ("names", "path", "words"),
    [
        (["gspo-gym"], "{scripts}", ["gspo-gym"]),
        (["gspo-gym"], "/nowhere", [".venv/bin/gspo-gym"]),
        ([], "{scripts}", ["{scripts}/python", "-m", "gspo_gym.cli"]),
    ],
    ids=["activated", "not activated", "without the script"],
)
def test_the_next_commands_are_as_short_as_works_here(monkeypatch, tmp_path, names, path, words):
    program, name = programs_by_path(monkeypatch, tmp_path, names=names, path=path)
    assert program == [word.format(scripts=tmp_path / ".venv" / "bin") for word in words]
    assert name == "quick"


def test_what_was_played_again_is_told_at_the_end(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for number, outcome in enumerate([Outcome.TERMINATED, Outcome.ENV_ERROR, Outcome.ENV_ERROR]):
        ledger.dispatch(Dispatched("a", number, "test/Env-v0#1", 1, 2))
        kept = Disposition.KEPT if outcome is Outcome.TERMINATED else Disposition.RETRIED
        ledger.settle(Terminal("a", number, outcome, kept))
    expected = "2 of 3 attempts at training episodes were played again or dropped: 2 env_error"
    assert _what_was_not_kept(tmp_path) == expected
    assert _what_was_not_kept(tmp_path / "nothing") is None


def test_models_whose_names_begin_alike_are_told_apart_at_80_columns():
    names = [f"runs/quickstart-with-a-long-label/checkpoints/step_{step:06d}" for step in (100, 200)]
    out = Console(record=True, width=80, file=io.StringIO())
    out.print(evaluation_table({name: evaluation(successes=1) for name in names}))
    cells = [line.strip("│┃ ").split("│")[0].strip() for line in out.export_text().splitlines()]
    shown = "".join(cells)
    assert all(name in shown for name in names)


def drawn(progress):
    out = console()
    out.print(progress.shown())
    return [line.rstrip() for line in out.export_text().splitlines()]


def test_live_progress_tells_the_time_left_from_the_pace_after_the_first_step():
    now = [100.0]
    phases = Phases(clock=lambda: now[0])
    progress = LiveProgress(console(is_terminal=True), clock=lambda: now[0], phases=phases)
    assert drawn(progress) == ["getting ready"]  # before there is a step
    progress.started(11)
    progress.stepped(1, {})
    now[0] = 106.0
    metrics = {"rollout/success_rate": 0.25, "clip/low_fraction": 0.1, "clip/high_fraction": 0.05}
    progress.stepped(4, metrics)
    phases.enter("collecting", total=4)
    now[0] = 109.0
    phases.advance("collecting")
    heads, cells, doing = drawn(progress)
    # 3 steps in 6 seconds, 7 steps left: 14 seconds
    assert dict(zip(heads.split(), cells.split(), strict=True)) == {
        "step": "4/11",
        "reward": "-",
        "success": "25%",
        "ratio": "-",
        "clipped": "15.0%",
        "entropy": "-",
        "tok/s": "-",
        "left": "0:14",
    }
    assert doing == "step 5/11: playing 1 of 4, 0:09 left; the run: 0:14 left"  # one in 3 s
