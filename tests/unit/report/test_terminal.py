"""What a run prints at its end."""

import io

import numpy as np
from rich.console import Console

from gspo_gym.evaluation import Evaluation, EvaluationRow, join
from gspo_gym.report.curve import text_curve
from gspo_gym.report.progress import LiveProgress, QuietProgress, make_progress
from gspo_gym.report.terminal import print_before_after, print_episode
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
    assert isinstance(make_progress(console()), QuietProgress)
    assert isinstance(make_progress(console(is_terminal=True)), LiveProgress)


def test_live_progress_tells_the_time_left_from_the_pace_after_the_first_step():
    now = [100.0]
    out = console(is_terminal=True)
    progress = LiveProgress(out, clock=lambda: now[0])
    progress.started(11)
    progress.stepped(1, {})
    now[0] = 106.0
    metrics = {"rollout/success_rate": 0.25, "clip/low_fraction": 0.1, "clip/high_fraction": 0.05}
    table = progress.table(4, metrics)
    progress.finished()
    cells = {column.header: next(iter(column.cells)) for column in table.columns}
    # 3 steps in 6 seconds, 7 steps left: 14 seconds
    assert cells["left"] == "0:14"
    assert cells["step"] == "4/11"
    assert cells["success"] == "25%"
    assert cells["clipped"] == "15.0%"
    assert cells["reward"] == "-"
