"""A chat template whose calls cannot be read back is refused alike by every command that would use it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_gym.cli.main import main
from gspo_gym.policy.load import load_policy, save_policy

CONFIG = """
[algorithm]
variety = "gspo"
[model]
base = '{base}'
label = "unreadable"
[rollout]
env_name = "SqlAnalyst"
max_turns = 2
max_output_tokens = 8
max_model_len = 4000
episodes_per_batch = 2
[training]
iterations_per_epoch = 1
group_size = 2
batch_size = 2
learning_rate = 1e-4
[evaluation]
seeds = "0:2"
[run]
folder = '{runs}'
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template writes texts of a call between quotes, and does not escape the quotes within."""
    folder = tmp_path_factory.mktemp("model") / "model"
    policy = load_policy("tiny:qwen3-64-v2@3")
    template = policy.tokenizer.chat_template
    written = "function.arguments if function.arguments is string else function.arguments | tojson"
    raw = "function.arguments | string"
    assert written in template
    policy.tokenizer.chat_template = template.replace(written, raw)
    save_policy(policy, folder)
    return folder


@pytest.mark.parametrize(
    "command",
    [
        "config check --deep FILE",
        "env check SqlAnalyst --model MODEL --num-seeds 2 --max-turns 2 --turns 1",
        "train FILE",
        "evaluate FILE",
    ],
)
def test_every_door_refuses_a_template_that_cannot_be_read(
    model: Path, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(CONFIG.format(base=model, runs=tmp_path / "runs"))
    words = {"FILE": str(file), "MODEL": str(model)}
    assert main([words.get(word, word) for word in command.split()]) != 0
    shown = "".join(capsys.readouterr())
    assert "writes a call in no format that can be read back" in " ".join(shown.split())
    assert "nearest is hermes" in " ".join(shown.split())
    assert not list(tmp_path.glob("runs/*/episodes*"))  # refused before the first episode
