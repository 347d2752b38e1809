"""Whole runs with a judge over HTTP: what they leave behind, how a spent budget stops them, and that they go on.

The judge is the fake that is shipped, on the loopback interface. That training on it works is in tests/learning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo_gym.cli.evaluate import run_evaluation
from gspo_gym.cli.train import run_training
from gspo_gym.config.run_config import RunConfig
from gspo_gym.errors import ConfigError
from gspo_gym.judge.base import JudgeBudgetError
from gspo_gym.judge.records import latest_judgements, read_judgements
from gspo_gym.judge.server import create_fake_judge_app
from gspo_gym.policy.checkpoints import CheckpointStore
from gspo_gym.remote.serving import BackgroundServer
from gspo_gym.rollout.episode_files import read_episodes
from gspo_gym.run.feedback_files import feedback_path, read_feedback
from gspo_gym.run.records import read_events, read_metrics, read_summary


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with BackgroundServer(create_fake_judge_app()) as server:
        yield f"{server.url}/v1"


BLEND = {"env": 0.2, "event": 0.4, "outcome": 0.4}


def config_of(folder: Path, url: str, *, blend: dict[str, float] = BLEND, **options: Any) -> RunConfig:
    """Two steps of 8 episodes, and evaluations of 4 before, between and after: 2 * 8 + 3 * 4 = 28 calls."""
    criteria = [{"id": "said", "description": 'The answer has a "4".', "scale": "binary"}]
    return RunConfig.from_dict(
        {
            "run": {"folder": str(folder)},
            "algorithm": {"variety": "gspo_token"},
            "model": {"base": "tiny:qwen3-64", "label": "run"},
            "rollout": {"env_name": "GuessNumber", "env_config": {"style": "terse"},
                        "max_turns": 2, "max_output_tokens": 2, "max_model_len": 256,
                        "episodes_per_batch": 8},
            "training": {"iterations_per_epoch": 2, "group_size": 4, "batch_size": 8, "learning_rate": 1e-3},
            "evaluation": {"seeds": "0:4", "every_n_iters": 1},
            "judge": {
                "enabled": True,
                "reward_blend": blend,
                "options": {"event": True, "outcome": True, "provider": "local", "model": "fake-judge",
                            "base_url": url, "rubric_overrides": {"event": {"criteria": criteria},
                                                                  "outcome": {"criteria": criteria}}, **options},
            },
        }
    )  # fmt: skip


def test_a_judged_run_leaves_every_judgement_and_what_it_cost(url: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, url)
    summary = run_training(config)
    judged = read_judgements(config.run_folder / "judgements.jsonl")
    names = [each.trajectory_id.split("/")[0] for each in judged]
    assert {name: names.count(name) for name in names} == {
        "eval_000000": 4, "step_000001": 8, "eval_000001": 4, "step_000002": 8, "eval_000002": 4
    }  # fmt: skip
    # an episode in which the policy says nothing is scored by rule and costs no call
    num_calls = sum(each.judgement.cost.num_calls for each in judged)
    assert judged[-1].spent.num_calls == num_calls <= 28
    metrics = read_metrics(config.run_folder)
    of_steps = [each.judgement.cost.num_calls for each in judged if not each.trajectory_id.startswith("eval_000002")]
    assert sum(line["judge/calls"] for line in metrics) == sum(of_steps)
    for line in metrics:
        assert (line["judge/num_judged"], line["judge/unscored"], line["judge/pause_seconds"]) == (8, 0, 0)
    by_name = {each.trajectory_id: each for each in judged}
    evaluated = read_episodes(config.run_folder / "episodes" / "eval_000002.jsonl.gz")
    assert summary["final_eval"]["mean_return"] == pytest.approx(sum(e.reward for e in evaluated) / 4)
    own = [by_name[episode.trajectory_id].env_return for episode in evaluated]
    assert summary["final_eval"]["mean_env_return"] == pytest.approx(sum(own) / 4)  # type: ignore[arg-type]


def test_a_spent_budget_stops_the_run_which_goes_on_with_more(url: str, tmp_path: Path) -> None:
    whole = config_of(tmp_path / "whole", url)
    run_training(whole)
    judged = read_judgements(whole.run_folder / "judgements.jsonl")
    num_calls = [each.spent.num_calls for each in judged if each.trajectory_id.startswith("eval_000001")][-1]
    limit = num_calls + 2  # two calls into step 2
    cut = config_of(tmp_path / "cut", url, max_calls=limit)
    with pytest.raises(JudgeBudgetError, match=rf"max_calls = {limit}, spent {limit}.*--resume"):
        run_training(cut)
    assert read_summary(cut.run_folder)["status"] == "failed"
    saved = CheckpointStore(cut.run_folder / "checkpoints").steps()
    assert saved == (0, 1)  # it stopped in step 2; step 1 is whole, and 0 is the run before its first step
    first = read_judgements(cut.run_folder / "judgements.jsonl")

    more = config_of(tmp_path / "cut", url, max_calls=100)
    summary = run_training(more, resume=True)
    assert (summary["status"], summary["steps"]) == ("completed", 2)
    lines = read_judgements(cut.run_folder / "judgements.jsonl")
    kept = [each for each in first if not each.trajectory_id.startswith("step_000002")]  # which is played again
    assert lines[: len(kept)] == kept
    assert lines[-1].spent.num_calls > first[-1].spent.num_calls >= num_calls
    # and what it learned is what the run that was not stopped learned
    metrics = [read_metrics(config.run_folder)[-1] for config in (whole, more)]
    for name in ("rollout/reward_mean", "judge/event", "judge/outcome", "loss/total"):
        assert metrics[0][name] == pytest.approx(metrics[1][name], abs=1e-6), name


def test_a_judge_of_groups_is_asked_once_a_group_and_a_resumed_run_gets_the_same_scores(
    url: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"blend": {"env": 0.2, "outcome": 0.8}, "event": False, "mode": "group"}
    whole = config_of(tmp_path / "whole", url, **options)
    run_training(whole)
    judged = read_judgements(whole.run_folder / "judgements.jsonl")
    calls: Counter[str] = Counter()
    for each in judged:
        assert each.judgement.outcome_review is not None
        is_trained = each.trajectory_id.startswith("step_")
        # Episodes of evaluations have no siblings: they are judged alone, by the rubric.
        assert set(each.judgement.outcome_review.criteria) == {"comparison" if is_trained else "said"}
        calls[each.trajectory_id.rpartition("/")[0] if is_trained else "evaluations"] += each.judgement.cost.num_calls
    assert calls.pop("evaluations") <= 12
    assert set(calls.values()) == {1}
    assert len(calls) == 4

    num_calls = [each.spent.num_calls for each in judged if each.trajectory_id.startswith("eval_000001")][-1]
    with pytest.raises(JudgeBudgetError):  # after the first group of the second step
        run_training(config_of(tmp_path / "cut", url, max_calls=num_calls + 1, **options))
    more = config_of(tmp_path / "cut", url, max_calls=100, **options)
    assert run_training(more, resume=True)["status"] == "completed"
    resumed = latest_judgements(read_judgements(more.run_folder / "judgements.jsonl"))
    assert {key: line.episode_return for key, line in resumed.items()} == {
        key: line.episode_return for key, line in latest_judgements(judged).items()
    }
    metrics = [read_metrics(config.run_folder)[-1] for config in (whole, more)]
    assert metrics[0]["loss/total"] == metrics[1]["loss/total"]


def test_a_budget_that_does_not_last_for_the_first_evaluation_can_be_raised_too(url: str, tmp_path: Path) -> None:
    with pytest.raises(JudgeBudgetError):
        run_training(config_of(tmp_path, url, max_calls=1))
    assert run_training(config_of(tmp_path, url), resume=True)["steps"] == 2


def test_episodes_that_are_played_ahead_are_judged_while_the_learner_works(url: str, tmp_path: Path) -> None:
    values = config_of(tmp_path, url).model_dump(exclude_none=True)
    values["training"]["max_staleness"] = 1
    values["correction"]["old_logprobs"] = "rollout"
    config = RunConfig.from_dict(values)
    assert run_training(config)["status"] == "completed"
    judged = {each.trajectory_id: each for each in read_judgements(config.run_folder / "judgements.jsonl")}
    episodes = [
        episode
        for step in (1, 2)
        for episode in read_episodes(config.run_folder / "episodes" / f"step_00000{step}.jsonl.gz")
    ]
    assert len(episodes) == 16
    assert [episode.reward for episode in episodes] == [judged[e.trajectory_id].episode_return for e in episodes]


def test_a_resumed_run_keeps_its_judge(url: str, tmp_path: Path) -> None:
    with pytest.raises(JudgeBudgetError):
        run_training(config_of(tmp_path, url, max_calls=1))
    with pytest.raises(ConfigError, match=r"judge\.options\.model: 'fake-judge' became 'other'"):
        run_training(config_of(tmp_path, url, model="other"), resume=True)


def test_a_rubric_that_is_not_there_leaves_nothing_behind(url: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, url, rubric_overrides={}, rubric_id="none.yaml")
    with pytest.raises(ConfigError, match=r"none\.yaml: there is no such file"):
        run_training(config)
    assert not config.run_folder.exists()


def test_an_evaluation_alone_is_judged_too(url: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, url)
    always_4 = run_evaluation(config, "scripted:reference")
    # the middle of 1-8 is 4, so the first guess and the outcome get 1; 0.2 * own + 0.4 * (1 or 2) + 0.4
    for row in always_4.rows:
        assert row.env_return is not None
        assert row.episode_return is not None
        assert row.episode_return - 0.2 * row.env_return >= 0.8 - 1e-9
    assert always_4.mean_env_return == pytest.approx(sum(row.env_return or 0 for row in always_4.rows) / 4)
    assert "of it without the judge" in always_4.sentence()


def test_a_judge_that_is_away_for_a_while_is_waited_for(tmp_path: Path) -> None:
    """The judge answers nobody until the run has said that it is paused; then it comes up at that address."""
    import socket
    import threading

    from gspo_gym.remote.serving import bind, server_for, url_of

    place: socket.socket = bind("127.0.0.1", 0, has_key=False)
    url = f"{url_of(place)}/v1"
    config = config_of(tmp_path, url)
    server = server_for(create_fake_judge_app())

    def wait_and_serve() -> None:
        events = config.run_folder / "events.jsonl"
        while not stopped.wait(0.05):
            if events.exists() and "judge_paused" in events.read_text():
                place.listen()
                server.run(sockets=[place])
                return

    stopped = threading.Event()
    thread = threading.Thread(target=wait_and_serve)
    thread.start()
    try:
        assert run_training(config)["status"] == "completed"
    finally:
        stopped.set()
        server.should_exit = True
        thread.join()
        place.close()
    kinds = [event["kind"] for event in read_events(config.run_folder) if event["kind"].startswith("judge_")]
    assert kinds[0] == "judge_paused"
    assert kinds[-1] == "judge_resumed"


def test_the_judges_reasons_are_what_a_policy_reads_that_teaches_itself(url: str, tmp_path: Path) -> None:
    """Of each turn the text is what the judgement in the file says of it; episodes without a reason teach nothing."""
    values = config_of(tmp_path, url).model_dump(exclude_none=True)
    values["distillation"] = {"teacher": "self", "feedback": "judge"}
    values["run"]["log_tokens_every_n_iters"] = 1
    config = RunConfig.from_dict(values)
    run_training(config)
    judged = {each.trajectory_id: each.judgement for each in read_judgements(config.run_folder / "judgements.jsonl")}
    episodes = read_episodes(config.run_folder / "episodes" / "step_000001.jsonl.gz")
    expected = {
        (episode.trajectory_id, turn): text
        for episode in episodes
        for turn, text in enumerate(judged[episode.trajectory_id].reasons_of_turns(len(episode.turns)))
        if text is not None
    }
    read = read_feedback(feedback_path(config.run_folder, 1))
    assert {(turn.trajectory_id, turn.turn): turn.text for turn in read} == expected
    assert 0 < len(expected) == read_metrics(config.run_folder)[0]["feedback/num_texts"]
