"""The table of every parameter of the five origins: none is missing, and what it says of each of them is so."""

import re
from pathlib import Path

from gspo_gym.config.reference import leaf_keys
from gspo_gym.config.services import missing_machinery

ROOT = Path(__file__).parents[3]
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


def test_all_of_them_are_there():
    assert {title: len(rows) for title, rows in sections().items()} == COUNTS
    assert f"{sum(COUNTS.values())} in all." in TABLE
    assert [row[0] for row in sections()["AgileRL 2.7: the constructor"]] == AGILERL.split()


def keys_of(where):
    return [name for name in re.findall(r"`([^`]+)`", where) if re.fullmatch(r"[a-z]+(\.[a-z_0-9]+)+", name)]


def test_every_key_that_a_row_names_exists():
    assert [(row[0], key) for row in ROWS for key in keys_of(row[1]) if not is_key(key)] == []


def test_every_name_of_code_that_a_row_names_exists():
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "gspo_gym").rglob("*.py"))
    source += (ROOT / "envs" / "__init__.py").read_text(encoding="utf-8")
    names = {
        name for row in ROWS for name in re.findall(r"`([A-Z]\w+|[a-z]+_\w+)(?:\.\w+)?`", row[1]) if "." not in name
    }
    assert len(names) >= 8
    assert [name for name in sorted(names) if not re.search(rf"(?:(?:def|class) |gspo_gym/){name}\b", source)] == []


def test_every_test_that_a_row_names_exists_and_speaks_of_the_parameter():
    """Not only there: a row about a key names a test in whose file that key, or the setting that it becomes, occurs."""
    silent = []
    for parameter, where, test in ROWS:
        file_name, name = test.split("::")
        text = (ROOT / "tests" / file_name).read_text(encoding="utf-8")
        assert f"def {name}(" in text, test
        leaves = [key.rpartition(".")[2] for key in keys_of(where)]
        words = [
            *leaves,
            *(re.sub(r"^(step_rewards|event_rewards|scoring|wandb)_", "", leaf) for leaf in leaves),
            parameter,
        ]
        if leaves and not any(re.search(rf"\b{re.escape(word)}\b", text) for word in words):
            silent.append((parameter, test))
    assert silent == [
        # the trajectories of gspo_token, which no key of a file names there
        ("use_gspo_token (train_with_gspo_token)",
         "unit/learning/test_credit_reaches_turns.py::test_a_turns_reward_moves_the_tokens_before_it_and_no_others"),
    ]  # fmt: skip


# What a row says is refused to run, and a configuration that is.
TWO_LEARN = {"compute": {"gpu_count": 3}, "topology": {"gpus_for_vllm": 1, "gpus_for_training": 2}}
REFUSED = {
    "compute.nodes": {"compute": {"gpu_count": 1, "nodes": 2}},
    "topology.gpus_for_training": {
        "compute": {"gpu_count": 3},
        "topology": {"gpus_for_vllm": 1, "gpus_for_training": 2},
    },
    "accelerator": TWO_LEARN,
}


def test_what_the_table_says_is_refused_is_refused_and_nothing_else(make):
    assert [row[0] for row in ROWS if "refused to run" in row[1]] == list(REFUSED)
    assert "this version" not in TABLE
    for parameter, changes in REFUSED.items():
        assert missing_machinery(make(changes).sections), parameter


def test_a_judge_vllm_and_a_served_reference_are_not_refused(make):
    """Rows about them once said so, and were false."""
    judge = {
        "enabled": True,
        "reward_blend": {"env": 0.5, "event": 0.25, "outcome": 0.25},
        "options": {"event": True, "outcome": True, "provider": "groq", "model": "m", "rubric_id": "a/b@v1",
                    "tracks": ["progress"], "weights": {"progress": 1.0}, "max_concurrency": 2},
    }  # fmt: skip
    split = {"compute": {"gpu_count": 3}, "vllm": {}, "loss.kl_coef": 0.1, "reference.placement": "dedicated"}
    split |= {"topology": {"gpus_for_vllm": 1, "gpus_for_training": 1, "gpus_for_ref": 1}}
    assert missing_machinery(make({"judge": judge, **split}).sections) == []


def test_every_key_of_the_hosted_reference_is_a_key_of_ours():
    assert [row[0] for row in sections()["The hosted trainer's TOML reference"] if not is_key(row[0])] == []
