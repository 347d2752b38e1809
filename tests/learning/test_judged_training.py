"""A run whose rewards come from environment and judge, end to end: a real HTTP judge in another process.

The judge is the fake that is shipped (it looks for the words in quotes), so what it must say about every stored episode
can be worked out here from the text alone, and with it every reward.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import programs
import pytest

from gspo_gym.cli.train import run_training
from gspo_gym.config.run_config import load_config
from gspo_gym.judge.model.transcript import says_nothing, visible
from gspo_gym.judge.records import latest_judgements, read_judgements
from gspo_gym.rollout.episode_files import read_episodes
from gspo_gym.run.records import read_events, read_metrics
from gspo_gym.types import Trajectory

ROOT = Path(__file__).parents[2]


@pytest.fixture
def judge_url() -> Iterator[str]:
    command = [sys.executable, "-m", "gspo_gym.cli", "judge", "fake", "--port", "0"]
    with programs.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split(" at ")[1].strip()
        process.terminate()


def said_by_policy(episode: Trajectory) -> list[str]:
    """What the environment was given of the policy in each turn."""
    return [message.content for message in episode.messages if message.role == "assistant"]


def is_silent(text: str) -> bool:
    """Whether nothing is said in a turn but thoughts."""
    return says_nothing(re.sub(r"<think>.*?(</think>|$)", "", text, flags=re.DOTALL))


@pytest.mark.slow
def test_training_raises_the_judged_score_and_every_reward_is_the_blend(judge_url: str, tmp_path: Path) -> None:
    config = load_config(
        ROOT / "configs" / "judge.toml",
        [f"run.folder={tmp_path}", f"judge.options.base_url={judge_url}", "training.iterations_per_epoch=12",
         "evaluation.every_n_iters=4"],
    )  # fmt: skip
    summary = run_training(config)
    folder = config.run_folder

    # what is trained on rises, and it is the judge's part of it
    assert summary["final_eval"]["mean_return"] > summary["initial_eval"]["mean_return"] + 0.4
    metrics = read_metrics(folder)
    judged = [0.4 * line["judge/event"] + 0.4 * line["judge/outcome"] for line in metrics]
    assert sum(judged[-3:]) / 3 > sum(judged[:3]) / 3 + 0.3

    # hand arithmetic on every stored training episode
    judgements = latest_judgements(read_judgements(folder / "judgements.jsonl"))
    num_checked = 0
    for path in sorted((folder / "episodes").glob("step_*.jsonl.gz")):
        for episode in read_episodes(path):
            record = judgements[episode.trajectory_id, episode.attempt]
            texts = said_by_policy(episode)
            # the rule of the fake: the word "4" is in what it reads, where \x04 is written out; nothing said is 0
            events = [1.0 if "4" in visible(text) and not is_silent(text) else 0.0 for text in texts]
            outcome = 1.0 if any("4" in visible(text) for text in texts) and not all(map(is_silent, texts)) else 0.0
            env = sum(reward or 0.0 for reward in record.env_rewards)
            assert record.judgement.event_totals == tuple(events)
            assert record.judgement.outcome_total == outcome
            assert episode.reward == pytest.approx(0.2 * env + 0.4 * sum(events) + 0.4 * outcome, abs=1e-9)
            assert record.episode_return == episode.reward
            for turn, event, own in zip(episode.turns, events, record.env_rewards, strict=True):
                is_last = turn.index == len(events) - 1
                by_hand = 0.2 * (own or 0.0) + 0.4 * event + (0.4 * outcome if is_last else 0.0)
                assert turn.reward == pytest.approx(by_hand, abs=1e-9)
                assert sum(turn.reward_terms.values()) == pytest.approx(turn.reward, abs=1e-9)
            num_checked += 1
    assert num_checked == 12 * 64

    # the means in metrics.jsonl are those of the stored episodes
    first = read_episodes(folder / "episodes" / "step_000001.jsonl.gz")
    totals = [judgements[episode.trajectory_id, episode.attempt].judgement.event_total for episode in first]
    assert metrics[0]["judge/event"] == pytest.approx(sum(totals) / 64)
    assert metrics[0]["reward/judge_event"] == pytest.approx(0.4 * sum(totals) / 64)
    assert metrics[0]["judge/unscored"] == 0

    # an evaluation shows the environment's own return apart
    evaluation = summary["final_eval"]
    assert evaluation["mean_env_return"] < evaluation["mean_return"]

    # the policy has learned to please the judge, and gold (was the number found?) says so
    events = [event for event in read_events(folder) if event["kind"].startswith("judge_")]
    assert [event["data"]["of_step"] for event in events if event["kind"] == "judge_gold"] == [1, 4, 8, 12]
    assert any(
        "the policy may be exploiting the judge" in e["data"]["reason"] for e in events if e["kind"] == "judge_drift"
    )
