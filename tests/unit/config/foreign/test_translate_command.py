"""`gspo-gym config from-...`: what it prints, and how it ends."""

import json
import sys

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
    expected = f"written: {out}; its head says what changes in meaning, `gspo-gym config check {out}` what it does\n"
    assert (status, printed, errors) == (0, expected, "")
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


def test_the_number_of_devices_multiplies_sizes_per_device(tmp_path, capsys):
    text = "per_device_train_batch_size: 4\nnum_generations: 8\n"
    out = tmp_path / "ours.toml"
    run(tmp_path, capsys, "trl", text, "--env", "GuessNumber", "--devices", "8", "--output", str(out))
    config = load_config(out)
    assert (config.training.batch_size, config.rollout.episodes_per_batch) == (4 * 8, 4 * 8)


@pytest.mark.parametrize(
    ("system", "text", "version"),
    [
        ("trl", "epsilon: 0.2", "TRL 1.16.0 (Unsloth 2026.10, transformers 5.19)"),
        ("roll", "pg_clip: 0.2", "ROLL's main of 2026 (base_config.py at 0a6a47e5)"),
        ("agilerl", "algorithm: {name: GSPO}", "AgileRL 2.58.0"),
        ("agilerl", "INIT_HP: {LR: 1e-6}", "AgileRL 2.7.0"),
        ("agilerl", "clip_coef: 0.2", "AgileRL 2.7.0"),
        ("stateset", "beta: 0.0", "stateset-agents 0.69.0"),
    ],
)
def test_a_translation_says_which_version_it_was_read_as_and_what_it_does_with_another(
    system, text, version, tmp_path, capsys
):
    _, printed, _ = run(tmp_path, capsys, system, text)
    assert (
        f"# - read as {version} means it: a key of another version that this one lacks is left out by name" in printed
    )


def test_a_file_of_neither_version_is_refused_with_both(tmp_path, capsys):
    status, printed, errors = run(tmp_path, capsys, "agilerl", "agent: {lr: 1e-6}\nworld: {}\n")
    assert (status, printed) == (2, "")
    assert "expected a file of AgileRL 2.58.0 or AgileRL 2.7.0, got one of neither: agent, world" in errors


@pytest.mark.parametrize("value", ["${b}", "${", "${a}"])
def test_a_reference_that_leads_nowhere_is_left_out_or_an_error_and_never_a_traceback(value, tmp_path, capsys):
    status, _, errors = run(tmp_path, capsys, "roll", f"pretrain: '{value}'\n")
    assert "what it stands for is not in this file" in errors or "OmegaConf cannot read the file" in errors
    assert status in (1, 2)


def test_omegaconf_is_loaded_for_files_that_refer_to_others_only(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "omegaconf", None)  # an import of it fails
    status, _, _ = run(tmp_path, capsys, "trl", "importance_sampling_level: sequence\nepsilon: 3.0e-4\n")
    assert status == 0


@pytest.mark.parametrize("system", ["trl", "roll", "agilerl", "stateset"])
def test_help_is_there(system, capsys):
    with pytest.raises(SystemExit):
        main(["config", f"from-{system}", "--help"])
    assert "YAML, JSON or TOML" in capsys.readouterr().out
