"""A run whose policy teaches itself with feedback: what is given, refused and recorded, and that it resumes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gspo_gym_envs.guess_number.env import GuessNumber
from safetensors.numpy import load_file
from small_run import small_run

from gspo_gym.chat.renderer import RendererCache
from gspo_gym.cli.train import run_training
from gspo_gym.cli.verify import verify_step
from gspo_gym.config.build.feedback import require_shown
from gspo_gym.config.run_config import RunConfig
from gspo_gym.env.checks.answers import AnswerCheck
from gspo_gym.errors import ConfigError, RecordError
from gspo_gym.learning.batching import build_batch
from gspo_gym.learning.settings import AdvantageSettings
from gspo_gym.policy.load import tiny_tokenizer
from gspo_gym.rollout.actors import ScriptedActor
from gspo_gym.rollout.episode import EpisodeRequest, episode_player
from gspo_gym.rollout.limits import EpisodeLimits
from gspo_gym.run.feedback import Feedback, FeedbackEnvironment, StepFeedback, leak_reason
from gspo_gym.run.feedback_files import FeedbackFate, TurnFeedback, feedback_path, pack_feedback, read_feedback
from gspo_gym.run.records import read_events, read_metrics
from gspo_gym.run.tokens import open_tokens
from gspo_gym.types import Task, Trajectory, TrajectoryGroup

RENDERERS = RendererCache(tiny_tokenizer())
SEED = 3


def number_of(seed: int) -> int:
    env = GuessNumber(style="terse")
    env.reset(seed=seed)
    assert env._number is not None
    return env._number


def played(name: str, guesses: Sequence[int]) -> Trajectory:
    play = episode_player(
        make_env=lambda _task: GuessNumber(style="terse"),
        act=ScriptedActor(lambda env, rng: lambda messages: str(guesses[sum(m.role == "assistant" for m in messages)])),
        renderers=RENDERERS,
        limits=EpisodeLimits(max_turns=4, max_model_len=4096, max_output_tokens=20),
    )
    return asyncio.run(play(EpisodeRequest(name, Task("test/Guess-v0", SEED), sampling_seed=0)))


def group() -> TrajectoryGroup:
    """One episode that loses with four wrong guesses, and one that wins with its second."""
    number = number_of(SEED)
    wrong = [guess for guess in range(1, 9) if guess != number]
    episodes = played("step_1/a/0", wrong), played("step_1/a/1", [wrong[0], number])
    return TrajectoryGroup(episodes[0].task, episodes, 2)


def give(
    source: Any, *, max_model_len: int = 4096, reasons: dict[str, Sequence[str | None]] | None = None
) -> StepFeedback:
    check = AnswerCheck(
        lambda: GuessNumber(style="terse"), env_id="test/Guess-v0", max_turns=4, step_timeout_seconds=None
    )
    feedback = Feedback(
        source,
        environments={"test/Guess-v0": FeedbackEnvironment(RENDERERS.for_tools(()), check)},
        max_model_len=max_model_len,
        judges_reasons=lambda name: (reasons or {}).get(name, ()),
    )
    groups = [group()]
    return asyncio.run(feedback.give(groups, built(groups)))


def built(groups: Sequence[TrajectoryGroup]) -> Any:
    return build_batch(groups, AdvantageSettings())


def fates(feedback: StepFeedback) -> dict[tuple[str, int], str]:
    return {(turn.trajectory_id[-1], turn.turn): turn.fate.value for turn in feedback.turns}


def test_the_environments_answers_are_read_but_for_that_which_names_the_number() -> None:
    feedback = give("environment")
    won = {("1", 0): "taught", ("1", 1): "taught"}
    assert fates(feedback) == {("0", 0): "taught", ("0", 1): "taught", ("0", 2): "taught", ("0", 3): "leak"} | won
    counts = {"num_turns": 6, "num_texts": 6, "num_taught": 5, "num_leak": 1}
    counts |= {"num_unchecked": 0, "num_too_long": 0, "num_template": 0}
    assert feedback.metrics == {f"feedback/{name}": float(count) for name, count in counts.items()}
    assert feedback.built.batch is not None
    prompts = feedback.built.batch.prompts
    assert [(prompt.trajectory, prompt.turn) for prompt in prompts] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    reason = leak_reason(feedback)
    assert reason is not None
    assert reason == (
        "1 of 6 texts of feedback say the hidden answer and were not used; in step_1/a/0, turn 3, "
        f"'{number_of(SEED)}' wins by itself"
    )


def test_a_siblings_success_that_a_single_action_repeats_is_the_answer() -> None:
    """GuessNumber is won by saying the number: showing an episode that found it is showing it."""
    assert fates(give("sibling")) == {("0", turn): "leak" for turn in range(4)}


def test_the_judges_reasons_are_read_before_their_turns_and_checked() -> None:
    number = number_of(SEED)
    reasons = {"step_1/a/0": ["hasty", None, f"it was {number}", "slow"], "step_1/a/1": ()}
    feedback = give("judge", reasons=reasons)
    assert fates(feedback) == {("0", 0): "taught", ("0", 2): "leak", ("0", 3): "taught"}
    assert [turn.text for turn in feedback.turns] == ["hasty", f"it was {number}", "slow"]
    assert leak_reason(give("judge", reasons={})) is None


def test_what_does_not_fit_the_window_is_counted_and_not_read() -> None:
    """The longest prompt that fits leaves room for the turn's tokens: the digit and its end, 2."""
    lengths = {turn.turn: len(turn.prompt_token_ids) + 2 for turn in give("environment").turns[:3]}
    feedback = give("environment", max_model_len=lengths[1])
    assert {key: fate for key, fate in fates(feedback).items() if key[0] == "0"} == {
        ("0", 0): "taught", ("0", 1): "taught", ("0", 2): "too_long", ("0", 3): "leak",
    }  # fmt: skip
    assert feedback.turns[2].reason == f"{lengths[2] - 2} + 2 tokens, and rollout.max_model_len = {lengths[1]}"
    assert feedback.turns[2].prompt_token_ids == ()


SELF = {"teacher": "self", "feedback": "environment", "coefficient": 0.1}


def config_of(folder: Path, **sections: Any) -> RunConfig:
    values = small_run(
        run={"folder": str(folder), "log_tokens_every_n_iters": 1},
        distillation=SELF,
        warmup={"num_episodes": 32, "num_epochs": 1, "learning_rate": 5e-3},
        training={"update_epochs": 2, "checkpoint_every_n_iters": 1, "keep_last": 9},
        optimizer={"schedule": "constant"},
    )
    return RunConfig.from_dict(values | {name: values.get(name, {}) | section for name, section in sections.items()})


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("feedback")
    run_training(config_of(folder))
    return folder / "test"


def test_a_run_records_what_the_teacher_read_and_verify_computes_it_again(recorded: Path) -> None:
    verified = verify_step(recorded, 2)
    assert verified.exit_code == 0, (verified.difference, verified.missing)
    turns = read_feedback(feedback_path(recorded, 2))
    assert {FeedbackFate.TAUGHT, FeedbackFate.LEAK} <= {turn.fate for turn in turns}
    (_, metrics) = read_metrics(recorded)
    for fate in FeedbackFate:
        assert metrics[f"feedback/num_{fate.value}"] == sum(turn.fate is fate for turn in turns)
    columns = open_tokens(recorded, 2).columns()
    is_taught = ~np.isnan(columns["teacher_log_ratio"])
    assert 0 < is_taught.mean() == pytest.approx(metrics["distillation/taught_fraction"])
    events = [event for event in read_events(recorded) if event["kind"] == "feedback_leaks"]
    assert [event["step"] for event in events] == [1, 2]
    assert "say the hidden answer" in events[0]["data"]["reason"]


def test_verify_finds_a_prompt_that_was_not_read(recorded: Path, tmp_path: Path) -> None:
    path = feedback_path(recorded, 2)
    original = path.read_text()
    lines = [json.loads(line) for line in original.splitlines()]
    taught = next(line for line in lines if line["prompt_token_ids"])
    taught["prompt_token_ids"][3] ^= 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    try:
        difference = verify_step(recorded, 2).difference
    finally:
        path.write_text(original)
    assert difference is not None
    assert (difference.quantity, difference.episode) == ("teacher_log_ratio", taught["trajectory_id"])
    (tmp_path / "x").write_text("{}\n")
    with pytest.raises(RecordError, match="x: no file of feedback"):
        read_feedback(tmp_path / "x")


def test_a_text_with_any_kind_of_line_end_is_read_again(tmp_path: Path) -> None:
    # U+0085 and U+2028 are in texts from the web, and str.splitlines ends lines at them, where JSON does not.
    turn = TurnFeedback("a/0", 0, "one\x85two\u2028three\nfour", FeedbackFate.TAUGHT, prompt_token_ids=(1, 2))
    path = tmp_path / "step_000001.feedback.jsonl"
    path.write_text(pack_feedback([turn]), encoding="utf-8")
    assert read_feedback(path) == [turn]


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(recorded: Path, tmp_path: Path) -> None:
    run_training(config_of(tmp_path, training={"iterations_per_epoch": 1}))
    run_training(config_of(tmp_path), resume=True)
    name = "checkpoints/step_000002"
    whole, parts = (
        load_file(next((folder / name).glob("model*.safetensors"))) for folder in (recorded, tmp_path / "test")
    )
    assert all(np.array_equal(whole[key], parts[key]) for key in whole)
    assert feedback_path(recorded, 2).read_text() == feedback_path(tmp_path / "test", 2).read_text()


def test_a_template_that_cannot_show_feedback_is_refused_by_name() -> None:
    tokenizer = tiny_tokenizer()
    refusal = "{%- if 'Feedback' in messages[-1]['content'] %}{{ raise_exception('no advice') }}{%- endif %}"
    tokenizer.chat_template = refusal + tokenizer.chat_template
    renderer = RendererCache(tokenizer).for_tools(())
    with pytest.raises(ConfigError, match=r"distillation\.feedback: the chat template .* after a user's message in G"):
        require_shown(renderer, "G", tool=None)
    require_shown(RENDERERS.for_tools(()), "G", tool=None)
