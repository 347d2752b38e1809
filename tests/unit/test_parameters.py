"""The table of every parameter of the five origins: the keys and tests that it names exist, and none is missing."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from gspo_gym.config.reference import leaf_keys

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "configs" / "recipes" / "PARAMETERS.md").read_text(encoding="utf-8")
# Counted by hand in the five documents: keys, constructor arguments, methods and functions with theirs.
COUNTS = {
    "The hosted trainer's TOML reference": 3 + 2 + 3 + 5 + 2 + 5 + 4 + 9 + 3 + 10 + 6 + 5 + 4 + 3 + 3 + 9,
    "ROLL": 18,
    "AgileRL 2.7: the constructor": 48,
    "AgileRL 2.7: methods, environments and functions": 23,
    "stateset-agents": 33,
    "Unsloth / TRL": 23,
}
# The constructor's arguments, from its signature.
AGILERL = """pad_token_id pad_token model_name actor_network model_config hp_config index batch_size beta lr clip_coef
max_grad_norm update_epochs group_size temperature repetition_penalty top_p top_k min_p use_memory_efficient_params
calc_position_embeddings micro_batch_size_per_gpu max_output_tokens min_output_tokens max_model_len
hf_generate_chunk_size lora_config cosine_lr_schedule_config accelerator device wrap clone use_vllm vllm_config seed
gradient_checkpointing torch_compiler use_liger_loss use_kl_advantage_shaping adv_norm use_separate_reference_adapter
whiten_advantages adv_clip_range filter_zero_adv adv_filter_eps reduce_memory_peak use_fused_linear_logprobs
cast_logprobs_to_fp32"""


def sections():
    """Title -> rows of (parameter, where, test)."""
    found = {}
    for part in TABLE.split("\n## ")[1:]:
        head, *lines = part.splitlines()
        title, number = head.rsplit(": ", 1)
        rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")][1:]
        assert len(rows) == int(number), title
        found[title] = rows
    return found


def is_key(name):
    """Whether our configuration has such a key, or such a section of keys."""
    return any(f"{key}.".startswith(f"{name}.") for key in leaf_keys())


ROWS = [row for rows in sections().values() for row in rows]


@cache
def functions(file_name):
    (path,) = (ROOT / "tests").rglob(file_name)
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_all_of_them_are_there():
    assert {title: len(rows) for title, rows in sections().items()} == COUNTS
    assert f"{sum(COUNTS.values())} in all." in TABLE
    assert [row[0] for row in sections()["AgileRL 2.7: the constructor"]] == AGILERL.split()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_names_keys_and_a_test_that_exist(row):
    _parameter, where, test = row
    keys = [name for name in re.findall(r"`([^`]+)`", where) if re.fullmatch(r"[a-z]+(\.[a-z_0-9]+)+", name)]
    assert [key for key in keys if not is_key(key)] == []
    file_name, name = test.split("::")
    assert name in functions(file_name)


def test_every_key_of_the_hosted_reference_is_a_key_of_ours():
    assert [row[0] for row in sections()["The hosted trainer's TOML reference"] if not is_key(row[0])] == []
