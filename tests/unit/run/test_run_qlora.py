"""A whole run on 4-bit weights: it trains, resumes, is evaluated, and is gone on with only as what it is."""

import pytest
from small_run import small_run

from gspo_gym.cli.evaluate import run_evaluation
from gspo_gym.cli.train import run_training
from gspo_gym.config.build.trainer import build_policy
from gspo_gym.config.run_config import RunConfig
from gspo_gym.errors import ConfigError
from gspo_gym.policy.quantization import is_quantized


def config(folder, mode="qlora", base="tiny:qwen3-64", iterations=1):
    return RunConfig.from_dict(
        small_run(
            run={"folder": str(folder)},
            model={"base": base, "label": "four-bits", "trainer_mode": mode},
            rollout={"max_turns": 2, "max_model_len": 192, "episodes_per_batch": 4},
            training={"iterations_per_epoch": iterations, "group_size": 2, "lora": {"r": 2}},
            evaluation={"seeds": "0:2"},
        )
    )


@pytest.mark.slow
def test_a_4_bit_run_trains_resumes_is_evaluated_and_is_gone_on_with_only_as_such(tmp_path):
    first = run_training(config(tmp_path))
    assert run_training(config(tmp_path, iterations=2), resume=True)["steps"] == 2
    assert run_evaluation(config(tmp_path)).summary()["mean_return"] == first["initial_eval"]["mean_return"]
    (folder,) = (path.parent for path in tmp_path.glob("four-bits/checkpoints/step_000002/**/adapter_config.json"))
    assert is_quantized(build_policy(config(tmp_path, base=str(folder))).model)
    with pytest.raises(ConfigError, match=r'model\.trainer_mode: .* quantized weights; set it to "qlora"'):
        build_policy(config(tmp_path, mode="lora", base=str(folder)))
