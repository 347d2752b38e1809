"""Values of the page that follow from a run's files by a rule, on small files written here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from small_run import small_run

from gspo_gym.cli.report import changed_settings
from gspo_gym.config.run_config import RunConfig
from gspo_gym.rollout.episode_files import write_episodes
from gspo_gym.run.recording import METRICS
from gspo_gym.run.report.page_data import KEY_CURVES, RecordedStep
from gspo_gym.types import FinishReason, ForkPoint, Message, Outcome, Segment, Task, Trajectory, Turn


def test_settings_that_differ_from_their_defaults_are_told_with_them_and_no_others(tmp_path: Path) -> None:
    """Also of tables that are absent by default, of which only what was set differs."""
    config = RunConfig.from_dict(
        small_run(
            rollout={"max_turns": 1} | {"episodes_per_batch": 8},
            training={"iterations_per_epoch": 1},
            evaluation={"seeds": "0:2"},
            judge={
                "enabled": True,
                "reward_blend": {"env": 1.0, "outcome": 0.5},
                "options": {"outcome": True, "provider": "local", "model": "m", "base_url": "http://127.0.0.1:1/v1"}
                | {"max_output_tokens": 4096, "timeout_s": 45.0, "rubric_id": "support_desk/bundle@v1"},
            },
        )
    )
    (tmp_path / "config.toml").write_text(config.to_toml())
    told = {key: (value, usual) for key, value, usual in changed_settings(tmp_path)}
    assert {key for key in told if key.startswith("judge.")} == {
        "judge.enabled",
        "judge.reward_blend.outcome",  # env is 1 by default
        *("judge.options.outcome", "judge.options.provider", "judge.options.model", "judge.options.base_url"),
        *("judge.timeout_s", "judge.options.rubric_id"),
    }
    assert told["judge.reward_blend.outcome"] == (0.5, 0.0)
    assert told["judge.timeout_s"] == (45.0, None)
    assert told["training.learning_rate"] == (1e-3, None)  # it has no default
    assert "training.update_epochs" not in told


def played(member: int, *parts: list[int]) -> Trajectory:
    """An episode of segments with these tokens, the last of each sampled."""
    segments = []
    for number, ids in enumerate(parts):
        mask = np.arange(len(ids)) == len(ids) - 1
        arrays = (np.where(mask, -1.0, 0.0), np.where(mask, number, -1), np.where(mask, 0, -1))
        segments.append(Segment(np.array(ids), mask, *arrays))
    turns = [
        Turn(number, number, (0, len(ids) - 1), (len(ids) - 1, len(ids)), FinishReason.STOP, reward=0.0)
        for number, ids in enumerate(parts)
    ]
    task = Task("test", 1)
    return Trajectory(f"group/{member}", 0, task, member, tuple(segments), tuple(turns), (), Outcome.TERMINATED)


def test_an_episode_leaves_its_siblings_at_the_first_token_that_none_of_them_has(tmp_path: Path) -> None:
    """As a segment and a place in it: of 0 the fourth token, of 2 the third, of 3 the fourth in its second segment."""
    episodes = [
        played(0, [1, 2, 3, 4, 7]),
        played(1, [1, 2, 3, 5, 7]),
        played(2, [1, 2, 6]),
        played(3, [1, 2], [3, 8]),
        played(4, [9, 9]),
        played(5, [9, 9]),
    ]
    (tmp_path / "config.toml").write_text("[model]\nlabel = 'test'\n")
    (tmp_path / "episodes").mkdir()
    write_episodes(tmp_path / "episodes" / "step_000001.jsonl.gz", episodes)
    whole = RecordedStep(tmp_path, "step_000001").group(0)
    assert [each["diverges"] for each in whole["episodes"]] == [(0, 3), (0, 3), (0, 2), (1, 1), None, None]


def test_a_fork_names_its_origin(tmp_path: Path) -> None:
    fork = replace(played(1, [1, 3]), forked_from=ForkPoint("group/0", 1))
    (tmp_path / "config.toml").write_text("[model]\nlabel = 'test'\n")
    (tmp_path / "episodes").mkdir()
    write_episodes(tmp_path / "episodes" / "step_000001.jsonl.gz", [played(0, [1, 2]), fork])
    (group,) = RecordedStep(tmp_path, "step_000001").outline()["groups"]
    assert [episode.get("fork") for episode in group["episodes"]] == [None, "fork of group/0 from turn 1"]


def test_two_groups_of_one_task_stay_two(tmp_path: Path) -> None:
    """Chosen tasks come again within a step; only episodes of one group are compared with each other."""
    episodes = [
        replace(played(member, [1, 2]), trajectory_id=f"{group}/{member}") for group in "ab" for member in (0, 1)
    ]
    (tmp_path / "config.toml").write_text("[model]\nlabel = 'test'\n")
    (tmp_path / "episodes").mkdir()
    write_episodes(tmp_path / "episodes" / "step_000001.jsonl.gz", episodes)
    groups = RecordedStep(tmp_path, "step_000001").outline()["groups"]
    assert [[episode["id"] for episode in group["episodes"]] for group in groups] == [["a/0", "a/1"], ["b/0", "b/1"]]


def test_a_task_is_named_by_the_words_at_which_it_begins_to_differ_from_others(tmp_path: Path) -> None:
    """A short message names its task whole; where all tasks of an environment begin alike, nothing does."""
    rules = "These are the rules of the game. " * 5
    texts = {
        "long": [
            f"{rules}Question:\nhow many\n  customers are there? {'x' * 80}",
            f"{rules}Question: how old are they?",
        ],
        "short": ["Guess 1-8.", "Guess 1-6."],
        "same": ["Begin.", "Begin."],
        "alone": ["Anything."],
    }
    episodes = [
        replace(
            played(0, [1, 2]), task=Task(name, seed), trajectory_id=f"{name}/{seed}", messages=(Message("user", text),)
        )
        for name, members in texts.items()
        for seed, text in enumerate(members)
    ]
    (tmp_path / "config.toml").write_text("[model]\nlabel = 'test'\n")
    (tmp_path / "episodes").mkdir()
    write_episodes(tmp_path / "episodes" / "step_000001.jsonl.gz", episodes)
    groups = RecordedStep(tmp_path, "step_000001").outline()["groups"]
    assert [group["opening"] for group in groups] == [
        f"many customers are there? {'x' * 54}",
        "old are they?",
        *("Guess 1-8.", "Guess 1-6."),
        *("", "", ""),
    ]
    assert [group["episodes"][0]["num_turns"] for group in groups] == [1] * 7


def test_the_curves_that_are_shown_first_are_metrics_of_a_run() -> None:
    assert set(KEY_CURVES) <= set(METRICS)
