import json
from pathlib import Path

import pytest
from transformers import GenerationConfig

from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.facts import abilities_of, facts_of, generation_config_of, sampling_of
from gspo_gym.policy.load import Policy, adapt_policy, load_policy, save_policy
from gspo_gym.policy.tiny import tiny_tokenizer

PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + PLAIN
OPENS = PLAIN.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}")


def test_a_models_sizes_are_those_of_its_shape() -> None:
    facts = facts_of("tiny:qwen3-64")
    # 263 tokens and a width of 64; in each of 2 layers q, k, v and o of 2 heads and 1 key head of 32, their two norms,
    # three matrices of 192 and two norms; a last norm.
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 2 * 32 + 3 * 64 * 192 + 2 * 64
    assert facts.num_parameters == 263 * 64 + 2 * layer + 64
    assert (facts.architecture, facts.context) == ("Qwen3ForCausalLM", 4096)
    assert (facts.num_token_ids, facts.num_rows) == (263, 263)
    assert facts.eos_token_ids == (258,)
    assert (facts.license, facts.dequantized, facts.num_adapter_parameters) == (None, None, None)
    assert facts.template.call == '<tool_call>\n{"name": "NAME", "arguments": {"KEY": "VALUE"}}\n</tool_call><|im_end|>'


def test_rows_of_padding_all_eos_ids_and_the_cards_licence_are_read_from_the_folder(tmp_path: Path) -> None:
    policy = load_policy("tiny:qwen3-64")
    policy.model.resize_token_embeddings(320)
    policy.model.generation_config = GenerationConfig(
        eos_token_id=[258, 256], do_sample=True, temperature=0.6, top_k=20
    )
    save_policy(policy, tmp_path)
    (tmp_path / "README.md").write_text("---\nlicense: mit\nlanguage: [en]\n---\n\n# A model\n", encoding="utf-8")
    facts = facts_of(str(tmp_path))
    assert facts.num_rows - facts.num_token_ids == 320 - 263
    assert facts.eos_token_ids == (258, 256)
    assert (facts.license, facts.dtype) == ("mit", "float32")
    assert facts.sampling == {"temperature": 0.6, "top_k": 20}
    lines = dict(facts.lines())
    assert lines["vocabulary"] == "263 token ids; 57 rows more are padding"
    assert lines["samples at"] == "temperature 0.6, top_k 20"
    assert json.loads(json.dumps(facts.to_json()))["eos_token_ids"] == [258, 256]


def test_an_adapters_facts_are_those_of_the_model_below_and_its_own_size(tmp_path: Path) -> None:
    whole = load_policy("tiny:qwen3-64")
    whole.model.generation_config = GenerationConfig(temperature=0.5, do_sample=True)
    save_policy(whole, tmp_path / "base")
    policy = adapt_policy(load_policy(str(tmp_path / "base")), LoraSettings(r=4, target_modules=("o_proj",)), seed=0)
    save_policy(policy, tmp_path / "adapter")
    facts = facts_of(str(tmp_path / "adapter"))
    added = 2 * 4 * (64 + 64)  # two layers, two factors of rank 4 of a matrix of 64 x 64
    assert facts.num_adapter_parameters == added
    assert facts.num_parameters == facts_of("tiny:qwen3-64").num_parameters + added
    assert facts.sampling == {"temperature": 0.5}


@pytest.mark.parametrize(
    ("template", "system", "tools", "reasoning", "opens"),
    [
        (None, True, True, True, False),  # the tiny models' own
        (PLAIN, True, False, False, False),
        (NO_SYSTEM, False, False, False, False),
        (OPENS, True, False, False, True),
    ],
)
def test_what_a_template_can_show_is_found_by_rendering(
    template: str | None, system: bool, tools: bool, reasoning: bool, opens: bool
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    abilities = abilities_of(tokenizer)
    assert abilities.refused is None
    assert (abilities.has_system_role, abilities.tools is None) == (system, tools)
    assert (abilities.shows_reasoning, abilities.opens_reasoning) == (reasoning, opens)
    assert (abilities.call is not None) == tools


def test_a_model_without_a_chat_template_says_so(tmp_path: Path) -> None:
    policy = load_policy("tiny:qwen3-64")
    policy.tokenizer.chat_template = None
    save_policy(policy, tmp_path)
    assert "there is none" in dict(facts_of(str(tmp_path)).lines())["chat template"]


@pytest.mark.parametrize(
    ("stated", "sampling"),
    [
        ({}, {}),
        ({"temperature": 0.7, "top_k": 20, "do_sample": True}, {"temperature": 0.7, "top_k": 20}),
        ({"repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
        ({"do_sample": False}, {"temperature": 0.0}),
    ],
)
def test_the_sampling_is_what_the_generation_config_states(
    stated: dict[str, float], sampling: dict[str, float], tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    policy = load_policy("tiny:qwen3-64")
    save_policy(Policy(policy.model, policy.tokenizer, policy.base), tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(stated), encoding="utf-8")
    assert sampling_of(generation_config_of(str(tmp_path / "model"))) == sampling


def test_a_tiny_model_states_no_sampling() -> None:
    assert sampling_of(generation_config_of("tiny:qwen3-64")) == {}
