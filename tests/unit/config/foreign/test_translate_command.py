"""`gspo-gym config from-...`: what it prints, and how it ends."""

import json

import pytest

from gspo_gym.cli.main import main
from gspo_gym.config.run_config import load_config


def run(tmp_path, capsys, system, text, *options):
    source = tmp_path / "theirs.yaml"
    source.write_text(text)
    status = main(["config", f"from-{system}", str(source), *options])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_whole_translation_is_written_and_ends_with_0(tmp_path, capsys):
    out = tmp_path / "ours.toml"
    options = ["--env", "GuessNumber", "--model", "tiny:qwen3-64", "--iterations", "3", "--output", str(out)]
    status, printed, errors = run(
        tmp_path, capsys, "trl", "importance_sampling_level: sequence\nepsilon: 3.0e-4\n", *options
    )
    assert (status, printed, errors) == (0, "", "")
    config = load_config(out)
    assert (config.algorithm.variety, config.loss.clip_low) == ("gspo", 3e-4)
    assert config.size.num_iterations == 3 * 3  # 3 epochs
    assert out.read_text().startswith("# Translated from TRL, ")
    assert "# Changes in meaning:\n# - " in out.read_text()


def test_a_key_that_is_left_out_ends_with_1_and_is_named(tmp_path, capsys):
    status, printed, errors = run(tmp_path, capsys, "trl", "fp16: true\nlosstype: grpo\n")
    assert status == 1
    assert "left out: fp16 = True: 16-bit floats with a loss scale are not supported; use bfloat16" in errors
    assert "left out: losstype = 'grpo': not a key that is known of TRL; did you mean 'loss_type'?" in errors
    assert "# Left out:" in printed


def test_a_file_may_be_json(tmp_path, capsys):
    status, printed, _ = run(
        tmp_path, capsys, "roll", json.dumps({"adv_estimator": "grpo", "num_return_sequences_in_group": 8})
    )
    assert status == 0
    assert 'baseline = "group"' in printed


def test_what_is_still_missing_is_said(tmp_path, capsys):
    status, _, errors = run(tmp_path, capsys, "roll", "adv_estimator: grpo\nnum_return_sequences_in_group: 1\n")
    assert status == 1
    assert "not valid yet" in errors
    assert "training.group_size" in errors


@pytest.mark.parametrize("system", ["trl", "roll", "agilerl", "stateset"])
def test_help_is_there(system, capsys):
    with pytest.raises(SystemExit):
        main(["config", f"from-{system}", "--help"])
    assert "YAML, JSON or TOML" in capsys.readouterr().out
