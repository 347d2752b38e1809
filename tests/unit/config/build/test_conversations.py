"""A configuration's chat template, the date that it shows, its tools, and reasoning that it opens: in whole runs."""

from __future__ import annotations

import asyncio
import datetime
import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from transformers.utils import chat_template_utils

from gspo_gym.cli.evaluate import run_evaluation
from gspo_gym.cli.main import main
from gspo_gym.cli.train import run_training
from gspo_gym.config.build import conversations
from gspo_gym.config.build.conversations import with_fixed_date
from gspo_gym.config.build.preflight import rehearse
from gspo_gym.config.run_config import RunConfig, load_config
from gspo_gym.errors import ConfigError, TemplateError
from gspo_gym.policy.load import load_tokenizer, tiny_tokenizer
from gspo_gym.rollout.episode_files import read_episodes
from gspo_gym.types import ParseStatus

TEMPLATES = Path(__file__).parents[2] / "chat" / "templates"
CHATML = (TEMPLATES / "chatml.jinja").read_text()
HEADED = "{% if add_generation_prompt or true %}On your guard.\n{% endif %}" + CHATML
DATED = "{{ 'Today Date: ' + strftime_now('%d %b %Y') + '\n' }}" + CHATML  # as Llama 3.2's and gpt-oss's
OPENING = CHATML.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")  # as DeepSeek R1's and Nemotron 3's
LOUD = CHATML.replace("assistant\\n' }}", "assistant\\nAnswer: ' }}")  # shows no answer as its prompt opens it
SMALL = {
    "rollout.max_turns": 2,
    "rollout.max_output_tokens": 3,
    "rollout.episodes_per_batch": 4,
    "training.iterations_per_epoch": 1,
    "training.group_size": 2,
    "training.batch_size": 4,
    "evaluation.seeds": "0:2",
}
WARMUP = {"warmup": {"num_episodes": 2, "learning_rate": 1e-3, "policy": "reference"}}


@pytest.fixture
def configured(make: Callable[..., RunConfig], tmp_path: Path) -> Callable[..., RunConfig]:
    """A small run in a folder of the test's, with this text in the file of model.chat_template."""

    def configure(template: str, **changes: Any) -> RunConfig:
        file = tmp_path / "given.jinja"
        file.write_text(template, encoding="utf-8")
        changes = {name.replace("__", "."): value for name, value in changes.items()}
        return make({**SMALL, "run.folder": str(tmp_path / "runs"), "model.chat_template": str(file), **changes})

    return configure


def prompts(folder: Path, step: int) -> set[str]:
    """The first lines of what the model read in a step's episodes and in its evaluation."""
    tokenizer = tiny_tokenizer()
    episodes = [
        episode
        for name in (f"step_{step:06d}", f"eval_{step:06d}")
        for episode in read_episodes(folder / "episodes" / f"{name}.jsonl.gz")
    ]
    texts = [tokenizer.decode(segment.token_ids.tolist()) for episode in episodes for segment in episode.segments]
    return {text.partition("\n")[0] for text in texts}


def test_a_template_from_a_file_is_the_runs_and_its_checkpoints(configured: Callable[..., RunConfig]) -> None:
    config = configured(HEADED)
    run_training(config)
    assert prompts(config.run_folder, 1) == {"On your guard."}
    checkpoint = config.run_folder / "checkpoints" / "step_000001"
    for copy in (config.run_folder / "chat_template.jinja", checkpoint / "chat_template.jinja"):
        assert copy.read_text() == HEADED
    assert load_tokenizer(str(checkpoint)).chat_template == HEADED
    # An evaluation of any model is under the configuration's template, as the run's own are.
    assert run_evaluation(config, "tiny:qwen3-64").num_episodes == 2

    Path(str(config.model.chat_template)).write_text(CHATML)
    longer = config.model_copy(update={"training": config.training.model_copy(update={"iterations_per_epoch": 2})})
    with pytest.raises(ConfigError, match=r"given\.jinja is another template than .*chat_template\.jinja, with which"):
        run_training(longer, resume=True)
    Path(str(config.model.chat_template)).write_text(HEADED)
    run_training(longer, resume=True)
    assert prompts(config.run_folder, 2) == {"On your guard."}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: .*No such file"),
        (..., "cannot be read: .*Is a directory"),
        (b"\xff\xfe", "cannot be read: "),
        (b"a\n{% for m in messages %}", "is no Jinja template: line 2: "),
    ],
)
def test_a_template_that_cannot_be_read_is_an_obstacle_of_training_and_of_an_evaluation(
    make: Callable[..., RunConfig], tmp_path: Path, content: Any, said: str
) -> None:
    file = tmp_path / "t.jinja"
    if content is ...:
        file.mkdir()
    elif content is not None:
        file.write_bytes(content)
    config = make({**SMALL, "run.folder": str(tmp_path / "runs"), "model.chat_template": str(file)})
    with pytest.raises(ConfigError, match=f"^model.chat_template: {file} {said}"):
        run_training(config)
    assert not config.run_folder.exists()
    for name in ("tiny:qwen3-64", "scripted:reference"):
        with pytest.raises(ConfigError, match=f"^model.chat_template: {file} {said}"):
            run_evaluation(config, name)


class Days:
    """A machine's clock, on which every look is a day later."""

    def __init__(self, first: datetime.date) -> None:
        self.now_at = first

    def today(self) -> datetime.date:
        self.now_at += datetime.timedelta(days=1)
        return self.now_at

    def now(self) -> datetime.datetime:
        return datetime.datetime.combine(self.today(), datetime.time(23, 59))

    fromisoformat = staticmethod(datetime.date.fromisoformat)


def test_the_date_that_a_template_shows_is_that_of_the_runs_start_also_after_midnight_and_a_resume(
    configured: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Days(datetime.date(2026, 11, 27))
    monkeypatch.setattr(chat_template_utils, "datetime", clock)
    monkeypatch.setattr(conversations, "datetime", SimpleNamespace(date=clock))
    config, told = configured(DATED), io.StringIO()
    run_training(config, console=Console(file=told, width=200))
    assert "the chat template shows today's date, which is 2026-11-28 for the whole run" in told.getvalue()
    assert prompts(config.run_folder, 1) == {"Today Date: 28 Nov 2026"}
    recorded = load_config(config.run_folder / "config.toml")
    assert recorded.model.template_date == "2026-11-28"
    assert clock.now_at == datetime.date(2026, 11, 28), "it was asked once"

    longer = config.model_copy(update={"training": config.training.model_copy(update={"iterations_per_epoch": 2})})
    run_training(longer, resume=True)
    assert prompts(config.run_folder, 2) == {"Today Date: 28 Nov 2026"}


@pytest.mark.parametrize(
    ("template", "given", "date"),
    [
        (DATED, None, "2026-11-28"),
        (DATED, "2024-07-26", "2024-07-26"),
        (CHATML, None, None),
        ({"a": CHATML, "tool_use": DATED}, None, "2026-11-28"),
        (None, None, None),
    ],
)
def test_a_date_is_fixed_where_a_template_shows_one(
    make: Callable[..., RunConfig], template: Any, given: str | None, date: str | None
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    config = make({} if given is None else {"model.template_date": given})
    fixed = with_fixed_date(config, tokenizer, today=datetime.date(2026, 11, 28))
    assert fixed.model.template_date == date


@pytest.mark.parametrize("day", ["2026-11-28", datetime.date(2026, 11, 28)])
def test_a_date_has_quotes_or_none(make: Callable[..., RunConfig], day: Any) -> None:
    config = make({"model.template_date": day})
    assert config.model.template_date == "2026-11-28"
    assert 'template_date = "2026-11-28"' in config.to_toml()


@pytest.mark.parametrize("day", ["yesterday", "2026-02-30", 20261128, datetime.datetime(2026, 11, 28)])
def test_what_is_no_date_is_refused(problems: Callable[..., list[str]], day: Any) -> None:
    (problem,) = problems({"model.template_date": day})
    assert problem.startswith("model.template_date: ")


@pytest.mark.parametrize("more", [{}, WARMUP])
def test_reasoning_that_the_prompt_opens_is_closed_by_demonstrations_and_a_deep_check_agrees_with_the_run(
    configured: Callable[..., RunConfig], more: dict[str, Any]
) -> None:
    config = configured(OPENING, **more, rollout__max_output_tokens=12)
    (played,) = asyncio.run(rehearse(config)).episodes
    answers = [message for message in played.messages if message.role == "assistant"]
    assert {message.reasoning_content for message in answers} == {""}
    assert played.success
    run_training(config)


@pytest.mark.parametrize("warmup", [WARMUP, {}], ids=["with demonstrations", "without"])
def test_a_template_that_shows_answers_in_another_form_than_it_opens_is_refused_at_every_door(
    configured: Callable[..., RunConfig], warmup: dict[str, Any]
) -> None:
    config = configured(LOUD, **warmup)
    refusal = "another form than its generation prompt opens"
    with pytest.raises(TemplateError, match=refusal):
        asyncio.run(rehearse(config))
    with pytest.raises(TemplateError, match=refusal):
        run_training(config)
    assert not config.run_folder.exists()


def test_an_environment_with_tools_is_played_with_a_template_that_knows_none_and_every_door_says_so(
    configured: Callable[..., RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"rollout.env_name": "SqlAnalyst", "rollout.max_model_len": 4096, "rollout.max_output_tokens": 200}
    config = configured(CHATML, **changes)
    seen = asyncio.run(rehearse(config))
    (note,) = seen.notes
    assert note.startswith("SqlAnalyst: the chat template of ")
    assert note.endswith("calls are read as <tool_call>{...}</tool_call>")
    assert [played.turns[-1].parse for played in seen.episodes] == [ParseStatus.OK]
    file = tmp_path / "run.toml"
    file.write_text(config.to_toml())
    assert main(["evaluate", str(file)]) == 0
    assert note in capsys.readouterr().err.splitlines()
    with pytest.raises(TemplateError, match=r'does not show tools.*"system_message"'):
        asyncio.run(rehearse(configured(CHATML, **changes, rollout__tools_in="template")))
