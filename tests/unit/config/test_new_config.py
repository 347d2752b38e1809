"""`gspo-gym config new`: a file that loads, whose comments tell the truth, and whose numbers fit model and task."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo_gym.cli.main import main
from gspo_gym.config.build.first_run import first_run
from gspo_gym.config.reference import new_config
from gspo_gym.config.run_config import RunConfig, load_config
from gspo_gym.env.core import TextEnv
from gspo_gym.env.registry import make
from gspo_gym.policy.tiny import tiny_tokenizer

TINY = "tiny:qwen3-64-v2"
CONFIGS = Path(__file__).parents[3] / "configs"
# And the committed configuration of each, which is known to learn.
BUNDLED = {
    "GuessNumber": "quickstart", "FrozenLake": "frozen_lake", "TicTacToe": "tic_tac_toe", "Countdown": "countdown",
    "Wordle": "wordle", "SqlAnalyst": "sql_analyst", "CodeRepair": "code_repair", "SupportDesk": "support_desk",
    "Homestead": "homestead",
}  # fmt: skip
# A decoder layer of 4 h^2 + 3 x 4 h^2 = 16 h^2 weights, and one embedding of 264 rows.
LAYERS, VOCABULARY = 12, 264


def written(env_name: str, model: str = TINY, options: dict[str, Any] | None = None) -> str:
    run = first_run(env_name, model=model, label="test", options=options)
    return new_config(run.sections, run.notes)


def sections(env_name: str, model: str = TINY, options: dict[str, Any] | None = None) -> dict[str, Any]:
    return tomllib.loads(written(env_name, model, options))


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def chat_model(folder: Path, *, hidden: int, context: int = 2048) -> str:
    """A folder as a download leaves it, but for the weights, which nobody reads; its tokenizer knows bytes."""
    tiny_tokenizer("qwen3-64-v2").save_pretrained(folder)
    sizes = {
        "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": context,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": True, **sizes}))
    return str(folder)


TEXT = written("GuessNumber")


@pytest.mark.parametrize("env_name", BUNDLED)
def test_a_tiny_model_gets_a_small_task_in_few_bytes_and_a_warm_up(env_name: str) -> None:
    config = RunConfig.from_dict(sections(env_name))
    assert config.warmup is not None
    committed = load_config(CONFIGS / f"{BUNDLED[env_name]}.toml")
    assert config.rollout.env_config == committed.rollout.env_config
    assert committed.warmup is not None
    assert config.warmup.policy == committed.warmup.policy
    assert config.rollout.max_turns == committed.rollout.max_turns


@pytest.mark.parametrize("env_name", BUNDLED)
def test_a_chat_model_is_spoken_to_in_sentences(env_name: str, tmp_path: Path) -> None:
    config = RunConfig.from_dict(sections(env_name, chat_model(tmp_path, hidden=64)))
    assert "style" not in config.rollout.env_config
    assert getattr(make(env_name).unwrapped, "style", "verbose") == "verbose"


def test_lengths_are_those_of_the_answers_and_of_the_longest_conversation() -> None:
    rollout = sections("GuessNumber")["rollout"]
    # A digit and the end of the turn, and one token more; four guesses.
    assert (rollout["max_output_tokens"], rollout["max_turns"]) == (3, 4)
    # The longest: "?" and "not a number 1-8" four times. Role, line and end of a message are 4 tokens, "Guess 1-8. 4
    # tries." is 19; after the last answer comes "not found"; each answer may have 3.
    said = [19, 16, 16, 16]
    longest = sum(4 + length for length in said) + 4 * (3 + 3)
    assert longest <= rollout["max_model_len"] < 2 * longest
    assert rollout["max_model_len"] % 64 == 0


def test_illegal_answers_that_the_rules_forgive_are_counted_as_turns() -> None:
    # Five moves of its own fill the board; the third illegal answer would forfeit the game.
    assert sections("TicTacToe")["rollout"]["max_turns"] == 5 + 2


@pytest.mark.parametrize(("hidden", "mode"), [(504, "full"), (512, "lora")])
def test_a_processor_trains_all_weights_up_to_50_million_and_an_adapter_above(
    hidden: int, mode: str, tmp_path: Path
) -> None:
    weights = LAYERS * 16 * hidden**2 + VOCABULARY * hidden  # and norms: 12 thousand
    assert (weights > 50_000_000) == (mode == "lora")
    given = sections("GuessNumber", chat_model(tmp_path, hidden=hidden))
    assert given["model"]["trainer_mode"] == mode
    assert ("lora" in given["training"]) == (mode == "lora")
    # The rates that learned with SmolLM2; all weights of a pretrained model take far smaller ones.
    assert given["training"]["learning_rate"] == (3e-4 if mode == "lora" else 1e-5)


def test_no_conversation_is_longer_than_the_model_reads(tmp_path: Path) -> None:
    model = chat_model(tmp_path, hidden=64, context=1000)
    assert sections("Homestead", model)["rollout"]["max_model_len"] == 1000


class _Alone(TextEnv):
    """One turn; nobody plays it by hand."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return "Say x.", {}

    def step(self, action: str) -> Any:
        return "", float(action == "x"), True, False, {}


def test_an_environment_without_players_has_no_warm_up_and_random_weights_are_warned_of() -> None:
    text = written(f"{__name__}:_Alone")
    assert "warmup" not in tomllib.loads(text)
    assert "random weights learn nothing without a warm-up" in " ".join(text.replace("#", "").split())


def test_options_of_the_command_line_go_over_the_small_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "new", "--env", "GuessNumber", "--option", "high=16", "--option", "max_guesses=9"]) == 0
    rollout = tomllib.loads(capsys.readouterr().out)["rollout"]
    assert (rollout["env_config"]["high"], rollout["env_config"]["low"], rollout["max_turns"]) == (16, 1, 9)
    assert main(["config", "new", "--env", "GuessNumber", "--option", "hihg=16"]) == 2
    assert "did you mean 'high'" in capsys.readouterr().err


def test_an_environment_that_cannot_be_made_without_arguments_says_so() -> None:
    text = written("Dataset")
    assert "# Note: environment 'gspo_gym/Dataset-v0' needs an argument 'rows': give it as rollout.env_config" in text
    rows = str(CONFIGS.parent / "examples" / "data" / "larger.jsonl")
    rollout = sections("Dataset", options={"rows": rows, "reward": "exact"})["rollout"]
    assert (rollout["max_turns"], rollout["max_output_tokens"]) == (1, 3)


def test_the_file_loads_and_trains_what_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my_task.toml"
    assert main(["config", "new", str(path), "--env", "Wordle", "--model", "Qwen/Qwen3-0.6B"]) == 0
    assert "gspo-gym train" in capsys.readouterr().out
    config = load_config(path)
    assert (config.rollout.env_name, config.model.base, config.model.label) == ("Wordle", "Qwen/Qwen3-0.6B", "my_task")
    assert main(["config", "new", str(path)]) == 2  # nothing is written over
    assert main(["config", "check", str(path), "--elsewhere"]) == 0


def test_commands_that_it_prints_can_be_pasted_whatever_the_file_is_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "it's b.toml"
    assert main(["config", "new", str(path)]) == 0
    commands = re.findall(r"`(gspo-gym .*?)` ", capsys.readouterr().out)
    named = [["gspo-gym", "config", "check", str(path)], ["gspo-gym", "train", str(path)]]
    assert [shlex.split(command) for command in commands] == named
    assert main(["env", "new", "BananaSort", "--folder", str(tmp_path / "of mine")]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  cd ")]
    folder, rest = shlex.split(line)[1], shlex.split(line)[2:]
    assert (Path(folder).parent.name, rest) == ("of mine", ["&&", "pip", "install", "-e", "."])


@pytest.mark.parametrize("name", ["tests:Nope", "GuesNumber", "no_such_module:Env"])
def test_an_environment_that_is_not_there_is_an_error_and_no_file_is_written(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "new", str(tmp_path / "run.toml"), "--env", name]) == 2
    assert name.rpartition(":")[2] in capsys.readouterr().err or "no_such_module" in name
    assert list(tmp_path.iterdir()) == []


def test_without_a_file_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "new"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["rollout"]["env_name"] == "GuessNumber"


def test_every_default_that_a_comment_states_is_the_default() -> None:
    config = RunConfig.from_dict(tomllib.loads(TEXT))
    section, stated = "", 0
    for line in TEXT.splitlines():
        section = match[1] if (match := re.fullmatch(r"(?:# )?\[(\w+)\]", line)) else section
        if (match := re.fullmatch(r"# (\w+) = (.+)", line)) and (held := getattr(config, section)) is not None:
            value = tomllib.loads(f"x = {match[2]}")["x"]
            actual = held.model_dump(mode="json")[match[1]]
            derived = {"unit", "level", "baseline"}  # what algorithm.variety sets
            assert actual == value or match[1] in derived, line
            stated += 1
    assert stated > 40


def test_every_key_of_a_section_is_there_with_its_meaning() -> None:
    for key in ("learning_rate", "stop_at_success_rate", "clip_low", "temperature", "seeds"):
        assert re.search(rf"^(# )?{key} (=|is absent)", TEXT, re.MULTILINE), key
    assert max(map(len, TEXT.splitlines())) <= 250


def test_a_model_that_is_nowhere_is_an_error_and_one_of_the_hub_is_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert main(["config", "new", "--model", str(tmp_path / "nowhere")]) == 2
    capsys.readouterr()
    assert main(["config", "new", "--model", "Qwen/Qwen3-0.6B"]) == 0  # tests have no network
    text = capsys.readouterr().out
    assert "# Note: Qwen/Qwen3-0.6B is not on this machine yet: lengths are counted in bytes." in text
    assert tomllib.loads(text)["model"]["trainer_mode"] == "lora"
