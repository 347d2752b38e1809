"""What contradicts what: each rule refuses just outside its border and is silent just inside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gspo_gym.config.record import Rule, RunRecord, partial_record, problems_of
from gspo_gym.config.run_config import RunConfig
from gspo_gym.config.words import Problem

Problems = Callable[[dict[str, Any]], list[str]]
Make = Callable[[dict[str, Any]], RunConfig]

LORA = {"model.trainer_mode": "lora"}
GRPO = {"algorithm.variety": "grpo"}
TOPOLOGY = {"type": "single_node_split", "gpus_for_vllm": 2, "gpus_for_training": 1, "gpus_for_ref": 0}
SPLIT = {"compute": {"gpu_count": 3}, "topology": TOPOLOGY, "vllm": {}}
TWO_LEARN = {
    "compute": {"gpu_count": 0},
    "topology": {"type": "cluster", "gpus_for_vllm": 1, "gpus_for_training": 2},
    "rollout.engine": "local",
}
CLUSTER = {
    "compute": {"gpu_count": 16, "nodes": 2},
    "topology": {"type": "cluster", "gpus_for_vllm": 8, "gpus_for_training": 8, "tensor_parallel": 2},
}
COLOCATED = {
    "compute": {"gpu_count": 1},
    "topology": {"type": "colocated", "gpus_for_vllm": 1, "gpus_for_training": 1},
}
ONE_EACH = {"gpus_for_vllm": 1, "gpus_for_training": 1}
TAUGHT = {"distillation.teacher": "tiny:qwen3-64"}
DECISIONS = {"training.step_rewards_mode": "decision_stepwise"}
FORKS = {
    "rollout.forks_per_episode": 2,
    "advantages": {"level": "trajectory", "baseline": "leave_one_out", "scale": "none"},
}
DEDICATED = {
    "compute": {"gpu_count": 4},
    "topology": {**TOPOLOGY, "gpus_for_ref": 1},
    "vllm": {},
    "reference": {"placement": "dedicated"},
    "loss": {"kl_coef": 0.1},
}
STALE = {"training.max_staleness": 1, "correction.old_logprobs": "rollout"}
HANDED_OVER = {"training.weight_sync": {"direct": "shared_memory"}}
ENDPOINT = {"engine_urls": ["http://localhost:8000"]}
RESCORED = {"rollout.engine": "http", "rollout.rescore": True, "services": ENDPOINT}
REPLACED = "correction.{}: looks at the sampler's logprobs, which rollout.rescore = true replaces by the learner's: {}"
NO_WEIGHTS = 'training.{}: has no effect with rollout.engine "http", which gets no weights: set {}, or remove this'
NOT_SHARED = 'has no effect with rollout.engine = "local": it shares the learner\'s weights; set {}, or remove this'


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    # the variety
    "unit of another variety": (
        {"loss.unit": "token"},
        'loss.unit: algorithm.variety "gspo" takes "trajectory" or "segment", got "token", which belongs to variety '
        '"grpo"',
    ),
    "turn ratio in gspo": (
        {"loss.unit": "turn"},
        'loss.unit: algorithm.variety "gspo" takes "trajectory" or "segment", got "turn", which belongs to variety '
        '"gspo_token"',
    ),
    "sequence ratio in grpo": (
        {**GRPO, "loss.unit": "trajectory", "loss.clip_low": 3e-4, "loss.clip_high": 4e-4},
        'loss.unit: algorithm.variety "grpo" takes "token", got "trajectory", which belongs to variety "gspo" or '
        '"gspo_token"',
    ),
    "turn advantages in gspo": (
        {"advantages.level": "turn"},
        'advantages.level: algorithm.variety "gspo" takes "trajectory", got "turn", which belongs to variety '
        '"gspo_token" or "grpo"',
    ),
    # departures that must be named
    "token mean of a sequence ratio": (
        {"loss.aggregation": "token-mean"},
        'loss.aggregation: expected "seq-mean-token-mean" (or "grpo", the same) with loss.unit "trajectory", got '
        '"token-mean", in which an episode weighs by its length; if that is meant, add "length_weighting" to '
        "algorithm.acknowledge",
    ),
    "dapo with a turn ratio": (
        {"algorithm.variety": "gspo_token", "loss.unit": "turn", "loss.aggregation": "dapo"},
        'loss.aggregation: expected "seq-mean-token-mean" (or "grpo", the same) with loss.unit "turn", got "dapo", in '
        'which an episode weighs by its length; if that is meant, add "length_weighting" to algorithm.acknowledge',
    ),
    "clip of 0.05": (
        {"loss.clip_low": 0.05},
        'loss.clip_low: expected less than 0.05 with loss.unit "trajectory", got 0.05: the ratio of a sequence stays '
        "within about 1e-3 of 1, so that this clip never acts (the paper has 3e-4 and 4e-4); if that is meant, add "
        '"wide_clip" to algorithm.acknowledge',
    ),
    "high clip of 0.2": (
        {"loss.clip_high": 0.2},
        'loss.clip_high: expected less than 0.05 with loss.unit "trajectory", got 0.2: the ratio of a sequence stays '
        "within about 1e-3 of 1, so that this clip never acts (the paper has 3e-4 and 4e-4); if that is meant, add "
        '"wide_clip" to algorithm.acknowledge',
    ),
    "a repetition penalty cannot be scored": (
        {"rollout.repetition_penalty": 1.1, "rollout.min_p": 0.1},
        "algorithm.acknowledge: rollout.repetition_penalty = 1.1: rollouts would come from another distribution than "
        'the one that is scored; if the bias is meant, add "truncated_sampling" here',
    ),
    "a departure that does not occur": (
        {"algorithm.acknowledge": ["wide_clip", "length_weighting"], "loss.clip_low": 0.1},
        'algorithm.acknowledge: "length_weighting" does not occur in these settings: remove it',
    ),
    "a truncation that is not there": (
        {"algorithm.acknowledge": ["truncated_sampling"], "rollout.top_p": 1.0},
        'algorithm.acknowledge: "truncated_sampling" does not occur in these settings: remove it',
    ),
    # the surrogate
    "probabilities of a trajectory": (
        {"loss.surrogate": "dppo", "correction.old_logprobs": "rollout"},
        "loss.surrogate: \"dppo\" needs unit 'token', got 'trajectory'",
    ),
    "probabilities that the learner computed": (
        {**GRPO, "loss.surrogate": "dppo"},
        'loss.surrogate: "dppo" bounds the distance from the probabilities that the tokens were sampled with: set '
        'correction.old_logprobs = "rollout"',
    ),
    "a geometric mean over turns that differ": (
        {"algorithm.variety": "gspo_token", "loss.surrogate": "gmpo"},
        'advantages.level: expected "trajectory", or loss.unit "turn", with loss.surrogate "gmpo", which has one '
        'advantage for all tokens of a unit, got "turn" with loss.unit "trajectory"',
    ),
    "a geometric mean over tokens that differ": (
        {"loss.surrogate": "gmpo", "rewards.kl_coef": 0.1},
        'loss.surrogate: "gmpo" has one advantage for all tokens of a unit, which rewards.kl_coef and '
        "advantages.kl_shaping_coef give to each token: set them to 0, got 0.1 and 0",
    ),
    "a geometric mean of one token": (
        {**GRPO, "loss.surrogate": "gmpo"},
        "loss.surrogate: \"gmpo\" needs unit 'trajectory' or 'segment' or 'turn', got 'token'",
    ),
    "a product over a turn": (
        {"algorithm.variety": "gspo_token", "loss.unit": "turn", "loss.surrogate": "vespo"},
        "loss.surrogate: \"vespo\" needs unit 'trajectory', got 'turn'",
    ),
    "a floor of weights that have none": (
        {**GRPO, "loss.surrogate": "cispo", "loss.clip_low": 0.2},
        'loss.clip_low: has no effect with surrogate "cispo"; remove it',
    ),
    "a temperature of another surrogate": (
        {"loss.sapo_temperatures": [1.0, 2.0]},
        'loss.sapo_temperatures: has no effect with surrogate "clip"; remove it',
    ),
    # clip and KL
    "dual clip inside the clip": (
        {**GRPO, "loss.dual_clip": 1.27},
        "loss.dual_clip: expected more than 1 + loss.clip_high = 1.27, where the other clip is, got 1.27",
    ),
    # the reference
    "KL without reference": (
        {"loss.kl_coef": 0.1, "reference.placement": "none"},
        'reference.placement: expected "shared" or "dedicated", because loss.kl_coef = 0.1 compares with a reference, '
        'got "none"',
    ),
    "adapter reference of a full model": (
        {"rewards.kl_coef": 0.1, "reference.source": "adapter"},
        'reference.source: "adapter" needs an adapter (model.trainer_mode "lora" or "qlora"): set "copy" or "auto"',
    ),
    "the base cannot follow": (
        {**LORA, "loss.kl_coef": 0.1, "reference": {"source": "base", "update_every_n_iters": 5}},
        "reference.update_every_n_iters: cannot move the frozen weights under the adapter, which are this reference: "
        'set reference.source to "adapter" or "copy"',
    ),
    "source without reference": (
        {"reference.source": "copy"},
        'reference.source: has no effect with reference.placement = "none": set that to "shared", or remove this',
    ),
    "updates without reference": (
        {"reference.update_every_n_iters": 5},
        'reference.update_every_n_iters: has no effect with reference.placement = "none": set that to "shared", or '
        "remove this",
    ),
    # rewards and advantages
    "group of one": (
        {"training.group_size": 1},
        'training.group_size: expected at least 2 with advantages.baseline "group", which compares siblings, got 1',
    ),
    "group of one with a group's std": (
        {"training.group_size": 1, "advantages.baseline": "batch", "advantages.scale": "group"},
        'training.group_size: expected at least 2 with advantages.scale "group", which compares siblings, got 1',
    ),
    "dropping groups that teach": (
        {"training.constant_groups": "drop", "advantages.baseline": "batch"},
        'training.constant_groups: "drop" leaves out groups that teach nothing, but with advantages.baseline "batch" '
        'they do: set "keep"',
    ),
    "choosing tasks where all of them teach": (
        {"training.adaptive_tasks": 9, "advantages.baseline": "batch"},
        "training.adaptive_tasks: chooses tasks of which the episodes of a group do not all earn the same, but with "
        'advantages.baseline "batch" the others teach, too: set "leave_one_out", or remove this',
    ),
    "choosing from no environments": (
        {"training.adaptive_tasks": 0},
        "training.adaptive_tasks: 0 chooses from the environments of [[rollout.mixture]], and there is none: give the "
        "number of training tasks, such as the rows of the data set, or remove this",
    ),
    "forks compared otherwise than with their siblings": (
        {"rollout.forks_per_episode": 2},
        "rollout.forks_per_episode: forks are compared with their siblings by returns, unscaled: set "
        'advantages.level = "trajectory", advantages.baseline = "leave_one_out", advantages.scale = "none", or remove '
        "this",
    ),
    "forks in the mean of an episode": (
        {**FORKS, "loss.surrogate": "gmpo"},
        'rollout.forks_per_episode: gives each turn an advantage of its own, and loss.surrogate "gmpo" has one for all '
        'tokens of a unit: set loss.unit to "turn", or remove this',
    ),
    "forks of a task app": (
        {**FORKS, "services": {"task_url": "http://localhost:8001"}},
        "rollout.forks_per_episode: episodes of a task app cannot be replayed: remove services.task_url, or this",
    ),
    "forks of a task app in a mixture": (
        {**FORKS, "rollout.mixture": [{"env_name": "Dice", "share": 0.5, "task_url": "http://localhost:8001"}]},
        "rollout.forks_per_episode: episodes of a task app cannot be replayed: remove rollout.mixture.0.task_url, or "
        "this",
    ),
    "step rewards without a mode": (
        {"training.step_rewards_enabled": True},
        'training.step_rewards_enabled: true demands training.step_rewards_mode "decision_stepwise" or "env_sparse", '
        "got null",
    ),
    # correction
    "correction without a level": (
        {"correction.mode": "mask"},
        'correction.mode: has no effect with correction.level = "none": choose a level, or remove this',
    ),
    "threshold without a level": (
        {"correction.high": 3.0},
        'correction.high: has no effect with correction.level = "none": choose a level, or remove this',
    ),
    "lower threshold of a truncation": (
        {"correction.level": "token", "correction.low": 0.1},
        'correction.low: has no effect with correction.mode = "truncate": set that to "mask", or remove this',
    ),
    # batches and lengths
    "half a group": (
        {"training.group_size": 6, "training.batch_size": 16},
        "rollout.episodes_per_batch: expected a multiple of training.group_size = 6, got 64",
    ),
    "a batch that does not divide": (
        {"training.batch_size": 24},
        "training.batch_size: expected a divisor of rollout.episodes_per_batch = 64, got 24",
    ),
    "a batch larger than all": (
        {"training.batch_size": 128},
        "training.batch_size: expected a divisor of rollout.episodes_per_batch = 64, got 128",
    ),
    "a batch that does not divide two": (
        {"training.batch_size": 24, "rollout.batches_per_step": 2},
        "training.batch_size: expected a divisor of rollout.episodes_per_batch = 128, got 24",
    ),
    "accumulation that does not divide": (
        {"training.gradient_accumulation_steps": 3},
        "training.batch_size x training.gradient_accumulation_steps: expected a divisor of rollout.episodes_per_batch "
        "= 64, got 48",
    ),
    "ppo with one step": (
        {"algorithm.method": "ppo", "training.batch_size": 64},
        'algorithm.method: "ppo" says that the clip acts, but each batch is used for one optimizer step, in which the '
        'ratio is 1: lower training.batch_size, raise training.update_epochs, or set "policy_gradient"',
    ),
    "more ops than turns": (
        {"rollout.ops": ["agent", "env"] * 9},
        "rollout.ops: expected at most rollout.max_turns = 8 pairs, got 9",
    ),
    "no room for a prompt": (
        {"rollout.max_output_tokens": 512},
        "rollout.max_output_tokens: expected less than rollout.max_model_len = 512 (a prompt needs room), got 512",
    ),
    "no room for the end": (
        {"rollout.min_output_tokens": 8},
        "rollout.min_output_tokens: expected less than rollout.max_output_tokens = 8 (the stop token needs room), got "
        "8",
    ),
    "temperature said twice": (
        {"rollout.temperature": 0.7, "rollout.policy_config": {"temperature": 0.5}},
        "rollout.policy_config.temperature: is rollout.temperature in the flat form, which is given, too: remove one "
        "of them",
    ),
    "tokens said twice": (
        {"rollout.policy_config": {"max_tokens": 9}},
        "rollout.policy_config.max_tokens: is rollout.max_output_tokens in the flat form, which is given, too: remove "
        "one of them",
    ),
    # the model
    "base and source": (
        {"model.source": "ft:other"},
        'model.base: contradicts model.source = "ft:other": give one of them, got "tiny:qwen3-64"',
    ),
    "its own source": (
        {"model.base": ..., "model.source": "rl:quickstart:step_000010"},
        'model.source: is this run\'s own model.label "quickstart": choose another label, or go on with it by '
        "--resume",
    ),
    "lora of a full model": (
        {"training.lora": {"r": 8}},
        'training.lora: has no effect with model.trainer_mode "full": set that to "lora", or remove this',
    ),
    "revision of a folder": (
        {"model.base": "models/mine/last", "model.revision": "v2"},
        'model.revision: "v2" is of a repository of the hub, and model.base = "models/mine/last" names none: remove it',
    ),
    "revision of a run": (
        {"model.base": ..., "model.source": "ft:other", "model.revision": "v2"},
        'model.revision: "v2" is of a repository of the hub, and model.base = null names none: remove it',
    ),
    "revision twice": (
        {"model.base": "someone/a-model@main", "model.revision": "v2"},
        'model.revision: is said twice: model.base = "someone/a-model@main" names one, too',
    ),
    "flash attention in 32 bits": (
        {"model.attn_implementation": "flash_attention_2"},
        'model.attn_implementation: "flash_attention_2" computes in 16 bits only: set model.dtype = "bfloat16" (with '
        'lora or qlora), or take "sdpa", got float32',
    ),
    "prefixes with eager attention": (
        {"model.attn_implementation": "eager", "training.share_prefixes": True},
        'training.share_prefixes: true needs model.attn_implementation "sdpa", got "eager": write false or "auto", or '
        "take that",
    ),
    "16 bits of a full model": (
        {"model.dtype": "bfloat16"},
        'model.dtype: "bfloat16" weights cannot be trained (steps smaller than 1/256 of a weight round away): '
        'set "float32", or model.trainer_mode = "lora", whose own weights are float32',
    ),
    # evaluation and optimizer
    "samples of greedy play": (
        {"evaluation.samples_per_task": 4, "evaluation.temperature": 0.0},
        "evaluation.samples_per_task: expected 1 with evaluation.temperature = 0, which plays the same episode again, "
        "got 4: raise the temperature, or remove this",
    ),
    "no evaluation": (
        {"evaluation.seeds": ...},
        "evaluation.seeds: required, but not given: the evaluation's tasks, such as 0:100",
    ),
    "floor of a constant rate": (
        {"optimizer.min_lr_fraction": 0.5},
        'optimizer.min_lr_fraction: has no effect with optimizer.schedule = "constant": set that to "linear" or '
        '"cosine", or remove this',
    ),
    "a form of quantization without any": (
        {"model.quantization": "int8"},
        'model.quantization: has no effect with model.trainer_mode = "full": set that to "qlora", or remove this',
    ),
    "no room for the cosine": (
        {"optimizer.schedule": "cosine", "optimizer.warmup_steps": 40},
        "optimizer.schedule: no step is left for the cosine decay: optimizer.warmup_steps = 40, and the run has "
        "40 optimizer steps",
    ),
    "no room for the linear decay after a fraction of warm-up": (  # 0.99 of 40 steps, rounded up
        {"optimizer.schedule": "linear", "optimizer.warmup_steps": 0.99},
        "optimizer.schedule: no step is left for the linear decay: optimizer.warmup_steps = 0.99, and the run has "
        "40 optimizer steps",
    ),
    "a part of a warm-up step": (
        {"optimizer.warmup_steps": 1.5},
        "optimizer.warmup_steps: expected whole steps, or a fraction of all steps below 1, got 1.5",
    ),
    # machines
    "GPUs that do not add up": (
        {**SPLIT, "compute": {"gpu_count": 4}},
        "topology: expected a sum of compute.gpu_count = 4, got gpus_for_vllm + gpus_for_training + gpus_for_ref = 2 + "
        "1 + 0 = 3",
    ),
    "a split of nothing": (
        {"topology": TOPOLOGY, "vllm": {}},
        "topology: splits GPUs, but there is no compute.gpu_count: give it",
    ),
    "one process that learns is not watched": (
        {**COLOCATED, "topology": {**COLOCATED["topology"], "max_restarts": 1}},
        "topology.max_restarts: has no effect with topology.gpus_for_training = 1: one process learns, and "
        "nothing waits for it; have more, or remove this",
    ),
    "one process shares no rows": (
        {**COLOCATED, "learner.sequence_parallel": 2},
        "learner.sequence_parallel: has no effect with topology.gpus_for_training = 1: one process learns; have more, "
        "or remove this",
    ),
    "rows for more than there are": (
        {**TWO_LEARN, "learner.sequence_parallel": 3},
        "learner.sequence_parallel: expected a divisor of topology.gpus_for_training = 2, got 3",
    ),
    "rows that drop out in parts": (
        {**TWO_LEARN, **LORA, "learner.sequence_parallel": 2, "training.lora.dropout": 0.5},
        "learner.sequence_parallel: processes with parts of a row would drop out others: set 1, or "
        "training.lora.dropout = 0.5 to 0",
    ),
    "compiled layers that exchange": (
        {**TWO_LEARN, "learner.sequence_parallel": 2, "model.torch_compile": True},
        "learner.sequence_parallel: layers that exchange tokens are not compiled: set 1, or model.torch_compile to "
        "false",
    ),
    "tensor parallel that does not divide": (
        {"compute": {"gpu_count": 3}, "topology": {**TOPOLOGY, "tensor_parallel": 3}},
        "topology.tensor_parallel: expected a divisor of topology.gpus_for_vllm = 2, got 3",
    ),
    "two tensor parallels": (
        {**SPLIT, "vllm": {"tensor_parallel_size": 2}},
        "vllm.tensor_parallel_size: expected topology.tensor_parallel = 1, got 2",
    ),
    "vLLM on more GPUs than there are": (
        {"compute": {"gpu_count": 3}, "vllm": {"tensor_parallel_size": 2}},
        "vllm: copies of tensor_parallel_size = 2 devices do not fill compute.gpu_count = 3",
    ),
    "sleep of an engine with GPUs of its own": (
        {"compute": {"gpu_count": 2}, "topology": ONE_EACH, "vllm": {"sleep_while_learning": True}},
        "vllm.sleep_while_learning: has no effect with topology.type = \"single_node_split\": vLLM has GPUs of its own "
        "there; set false, or remove this",
    ),
    "sleep of an engine that samples meanwhile": (
        {**STALE, "vllm": {"sleep_while_learning": True}},
        "vllm.sleep_while_learning: has no effect with training.max_staleness = 1: episodes are played while the "
        "learner works; set 0, or remove this",
    ),
    "one node of two": (
        {**SPLIT, "compute": {"gpu_count": 3, "nodes": 2}},
        'topology.type: "single_node_split" splits one machine\'s GPUs, but compute.nodes = 2: set "cluster"',
    ),
    "shared GPUs that do not add up": (
        {"compute": {"gpu_count": 3}, "topology": {**TOPOLOGY, "type": "colocated"}},
        "topology: expected compute.gpu_count = 3, got the larger of gpus_for_vllm and gpus_for_training, which are "
        "the same GPUs, and gpus_for_ref: 2 + 0 = 2",
    ),
    "a broadcast on shared GPUs": (
        {**COLOCATED, "training.weight_sync": {"direct": "nccl"}},
        'training.weight_sync.direct: "nccl" needs [topology], which gives vLLM GPUs of its own; on the learner\'s '
        'own GPU set "ipc"',
    ),
    "type of no GPU": (
        {"compute": {"gpu_count": 0, "gpu_type": "H100"}},
        "compute.gpu_type: has no effect with compute.gpu_count = 0: remove one of them",
    ),
    "vllm and the local engine": (
        {"vllm": {}, "rollout.engine": "local"},
        'vllm: has no effect with rollout.engine "local": set that to "vllm", or remove this section',
    ),
    "topology and the local engine": (
        {"compute": {"gpu_count": 3}, "topology": TOPOLOGY, "rollout.engine": "local"},
        'topology: has no effect with rollout.engine "local": set that to "vllm", or remove this section',
    ),
    "endpoints and the local engine": (
        {"services": {"engine_urls": ["http://localhost:8000"]}},
        'services.engine_urls: has no effect with rollout.engine "local": the learner\'s weights sample. Remove this, '
        'or set that to "http"',
    ),
    "endpoints and vLLM": (
        {"vllm": {"max_model_len": 512}, "services": {"engine_urls": ["http://localhost:8000"]}},
        'services.engine_urls: has no effect with rollout.engine "vllm": this process starts vLLM. Remove this, or set '
        'that to "http"',
    ),
    "an endpoint without a URL": (
        {"rollout.engine": "http"},
        'rollout.engine: "http" needs services.engine_urls: name the endpoint, such as ["http://localhost:8000"]',
    ),
    "an episode longer than the server's": (
        {"vllm": {"max_model_len": 256}},
        "vllm.max_model_len: expected at least rollout.max_model_len = 512, which episodes may need, got 256",
    ),
    "dedicated without a GPU": (
        {**DEDICATED, "compute": {"gpu_count": 3}, "topology": TOPOLOGY},
        'reference.placement: "dedicated" needs topology.gpus_for_ref = 1, because one process scores the reference, '
        "got 0",
    ),
    "a GPU for no reference": (
        {**DEDICATED, "reference": {"placement": "shared"}},
        'reference.placement: expected "dedicated" with topology.gpus_for_ref = 1, got "shared"',
    ),
    "more GPUs than the reference's processes": (
        {**DEDICATED, "compute": {"gpu_count": 5}, "topology": {**TOPOLOGY, "gpus_for_ref": 2}},
        'reference.placement: "dedicated" needs topology.gpus_for_ref = 1, because one process scores the reference, '
        "got 2",
    ),
    # weights that are shared
    "rare weights": ({"training.weight_sync_interval": 2}, f"training.weight_sync_interval: {NOT_SHARED.format(1)}"),
    "full transfer": (
        {"training.weight_sync": {"mode": "full"}},
        f"training.weight_sync.mode: {NOT_SHARED.format(chr(34) + 'auto' + chr(34))}",
    ),
    "transfer by file": (
        {"training.weight_sync": {"direct": False}},
        f"training.weight_sync.direct: {NOT_SHARED.format('true')}",
    ),
    "checks of a transfer": (
        {"training.weight_sync": {"verify_every_k": 3}},
        f"training.weight_sync.verify_every_k: {NOT_SHARED.format(0)}",
    ),
    # samples of other weights
    "samples of the learner's own weights, rescored": (
        {"rollout.rescore": True},
        'rollout.rescore: has no effect with rollout.engine "local", which samples from the learner\'s own weights: '
        'set that to "http", or remove this',
    ),
    "samples of an app's agent, rescored": (
        {**RESCORED, "services": {**ENDPOINT, "task_url": "http://localhost:8001"}},
        "rollout.rescore: true trains on environments that are played here, not by task apps: remove "
        "services.task_url, or this",
    ),
    "samples of an app of a mixture, rescored": (
        {**RESCORED, "rollout.mixture": [{"env_name": "Dice", "share": 0.5, "task_url": "http://localhost:8001"}]},
        "rollout.rescore: true trains on environments that are played here, not by task apps: remove "
        "services.task_url, or this",
    ),
    "the sampler's logprobs as old ones": (
        {**RESCORED, "correction.old_logprobs": "rollout"}, REPLACED.format("old_logprobs", 'set "recompute"'),
    ),
    "a correction by the sampler's logprobs": (
        {**RESCORED, "correction.level": "token"}, REPLACED.format("level", 'set "none"'),
    ),
    "a threshold on the sampler's logprobs": (
        {**RESCORED, "correction.off_policy_threshold": 0.1}, REPLACED.format("off_policy_threshold", "remove this"),
    ),
    "an alarm for the sampler's logprobs": (
        {**RESCORED, "correction.max_engine_gap": 0.1}, REPLACED.format("max_engine_gap", "remove this"),
    ),
    "an age of weights without a version": (
        {**RESCORED, "training.max_staleness": 1},
        "training.max_staleness: expected 0 with rollout.rescore = true, got 1: the weights that sample have no "
        "version to be behind",
    ),
    "rare weights for an endpoint": (
        {**RESCORED, "training.weight_sync_interval": 2}, NO_WEIGHTS.format("weight_sync_interval", 1),
    ),
    "full transfer to an endpoint": (
        {**RESCORED, "training.weight_sync": {"mode": "full"}},
        'training.weight_sync.mode: has no effect with rollout.engine = "http": it gets no weights; set "auto", or '
        "remove this",
    ),
    "transfer by file to an endpoint": (
        {**RESCORED, "training.weight_sync": {"direct": False}}, NO_WEIGHTS.format("weight_sync.direct", "true"),
    ),
    "checks of a transfer to an endpoint": (
        {**RESCORED, "training.weight_sync": {"verify_every_k": 3}},
        NO_WEIGHTS.format("weight_sync.verify_every_k", 0),
    ),
    "an endpoint's model in this process": (
        {"services": {"engine_model": "teacher"}},
        'services.engine_model: has no effect with rollout.engine = "local": set that to "http", or remove this',
    ),
    "transfer to nobody": (
        {"training.weight_sync": {"targets": []}},
        'training.weight_sync.targets: expected ["policy"], which is all that samples, got []',
    ),
    "no transfer": (
        {"training.weight_sync": {"enable": False}},
        "training.weight_sync.enable: expected true, without which the policy that samples never learns, got false",
    ),
    # weights that are handed over
    "tensors for an engine that shares them": (
        {"training.weight_sync": {"direct": "shared_memory"}},
        f"training.weight_sync.direct: {NOT_SHARED.format('true')}",
    ),
    "tensors in 4 bits": (
        {"vllm": {}, "model.trainer_mode": "qlora", "training.lora": {"r": 4}, **HANDED_OVER},
        'training.weight_sync.direct: "shared_memory" hands over whole models, and quantized weights cannot be: set '
        "true",
    ),
    "tensors of an adapter": (
        {"vllm": {}, **LORA, "training.weight_sync": {"direct": "shared_memory", "mode": "direct"}},
        'training.weight_sync.direct: "shared_memory" hands over whole models, but training.weight_sync.mode '
        '"direct" sends an adapter alone: set that to "auto" or "full", which merge it, or this to true',
    ),
    "tensors of a version that is gone": (
        {"vllm": {}, **STALE, **HANDED_OVER},
        'training.weight_sync.direct: "shared_memory" keeps no copy of a version, so that an engine that dies could '
        'not be given the one that it had: set training.max_staleness = 0, which is 1, or this to true',
    ),
    "a broadcast on one GPU": (
        {"vllm": {}, "training.weight_sync": {"direct": "nccl"}},
        'training.weight_sync.direct: "nccl" needs [topology], which gives vLLM GPUs of its own; on the learner\'s '
        'own GPU set "ipc"',
    ),
    "the learner's GPU where vLLM has others": (
        {**SPLIT, "training.weight_sync": {"direct": "ipc"}},
        'training.weight_sync.direct: "ipc" needs vLLM on the learner\'s own GPU, but [topology] gives it others: '
        'set "nccl"',
    ),
    "the learner's GPU for two": (
        {"vllm": {"tensor_parallel_size": 2}, "training.weight_sync": {"direct": "ipc"}},
        'training.weight_sync.direct: "ipc" needs vLLM on the learner\'s own GPU alone, but it takes 2: '
        'set true, or "nccl" with [topology]',
    ),
    "weights that an evaluation would miss": (
        {"vllm": {}, "training.weight_sync_interval": 3, "training.max_staleness": 2, "correction.level": "token"},
        "training.weight_sync_interval: expected a divisor of training's iterations, so that the engine has the "
        "present weights then, got 3",
    ),
    # samples that lie behind
    "stale samples as if they were fresh": (
        {"training.max_staleness": 1},
        "training.max_staleness: expected 0, got 1: samples of earlier weights would be taken for fresh ones; "
        'set correction.old_logprobs = "rollout", so that the ratio begins at the weights that sampled, or a '
        "correction.level",
    ),
    "weights that are sent too rarely for fresh samples": (
        {"vllm": {}, "training.weight_sync_interval": 2},
        "training.max_staleness: expected at least training.weight_sync_interval - 1 = 1, which samples lie behind "
        "before new weights are sent, got 0",
    ),
    # tracking
    "one sink twice": (
        {"tracking.report_to": ["wandb", "wandb"]},
        'tracking.report_to: names a sink twice: ["wandb", "wandb"]',
    ),
    "project of no sink": (
        {"tracking.wandb_project": "x"},
        'tracking.wandb_project: has no effect with tracking.report_to = []: add "wandb", "trackio" or "mlflow" there, '
        "or remove this",
    ),
    "project with another sink": (
        {"tracking": {"report_to": ["tensorboard"], "wandb_project": "x"}},
        'tracking.wandb_project: has no effect with tracking.report_to = ["tensorboard"]: add "wandb", "trackio" or '
        '"mlflow" there, or remove this',
    ),
    # a teacher
    **{
        f"{key} of no reward": (
            {**TAUGHT, "distillation.reward": False, key: value},
            f"{key}: goes by rewards, which distillation.reward = false does not learn from: remove this, or set "
            "that to true",
        )
        for key, value in {
            "training.constant_groups": "drop", "training.adaptive_tasks": 8, "advantages.whiten": "tokens",
            "advantages.baseline": "batch", "advantages.scale": "none",
            "loss.surrogate": "cispo", "loss.clip_low": 1e-3, "loss.clip_high": 1e-3, "loss.dual_clip": 3.0,
            "rewards.overlong": 0.5, "rewards.clip": 1.0,
            "training.step_rewards_mode": "off", "correction.off_policy_threshold": 0.1,
        }.items()
    },
    "weights of no term": (
        {**TAUGHT, "distillation.reward": False, **GRPO, "loss.aggregation": "token-mean"},
        "loss.aggregation: weighs the terms of rewards, KL and entropy, and with distillation.reward = false there is "
        "none of them: the teacher's is a mean over sampled tokens; remove this",
    ),
    "feedback of siblings that there are not": (
        {
            "distillation": {"teacher": "self", "feedback": "sibling", "reward": False},
            "training.group_size": 1,
        },
        'distillation.feedback: expected training.group_size of at least 2 with "sibling", a successful episode of the '
        "same group, got 1, so that there is no feedback",
    ),
    "turns' advantages of no reward": (
        {**TAUGHT, "distillation.reward": False, "algorithm.variety": "gspo_token", "advantages.level": "trajectory"},
        "advantages.level: goes by rewards, which distillation.reward = false does not learn from: remove this, or set "
        "that to true",
    ),
    "a baseline of an exact divergence": (
        {**TAUGHT, "distillation.baseline": True, "distillation.divergence": "reverse_kl"},
        'distillation.baseline: takes noise off the log-ratio of the sampled token, and divergence = "reverse_kl" has '
        'no such noise: remove this, or set that to "sampled"',
    ),
    "a policy that teaches itself nothing": (
        {"distillation.teacher": "self"},
        "distillation.feedback: the teacher 'self' is the policy, and teaches nothing that it does not read; set "
        "'environment', 'judge' or 'sibling'",
    ),
    "another teacher that reads feedback": (
        {**TAUGHT, "distillation.feedback": "environment"},
        "distillation.feedback: only the teacher 'self' reads feedback, got 'environment' with the teacher "
        "'tiny:qwen3-64'; remove it, or set teacher = 'self'",
    ),
    **{
        f"{name} of other prompts": (
            {"distillation": {"teacher": "self", "feedback": "environment", name: value}},
            f"distillation.{name}: is not computed for the teacher 'self', which reads other prompts than the policy; "
            "remove it",
        )
        for name, value in (("baseline", True), ("divergence", "forward_kl"))
    },
    "the reasons of no judge": (
        {"distillation": {"teacher": "self", "feedback": "judge"}},
        'distillation.feedback: expected the judge of [judge], whose reasons are the feedback: set judge.enabled = '
        'true, got "judge"',
    ),
    "feedback for a task app's agent": (
        {"distillation": {"teacher": "self", "feedback": "environment"}, "services.task_url": "http://localhost:1"},
        'distillation.feedback: expected "none" with a task app, whose agent writes the prompts, got "environment": '
        "feedback cannot be put into them, nor texts be checked for the hidden answer",
    ),
    **{
        f"{name} of a teacher behind an endpoint": (
            {"distillation.teacher": "http://localhost:8000/v1", f"distillation.{name}": value},
            f"distillation.{name}: is a sum over the vocabulary, and an endpoint gives logprobs of the sampled tokens "
            "only: remove it, or name a model that loads here in distillation.teacher",
        )
        for name, value in (("baseline", True), ("divergence", "reverse_kl"))
    },
    **{
        f"{name} of a teacher that loads here": (
            {**TAUGHT, f"distillation.{name}": "x"},
            f'distillation.{name}: has no effect with distillation.teacher = "tiny:qwen3-64", which is no endpoint: '
            "remove this, or set that to a URL",
        )
        for name in ("teacher_model", "teacher_tokenizer", "api_key_env")
    },
    "a teacher's address with a query": (
        {"distillation.teacher": "http://localhost:8000/v1?key=1"},
        "distillation.teacher: expected a URL without a query or a fragment: routes are appended to it",
    ),
    "a teacher's address in capitals": (
        {"distillation.teacher": "HTTP://localhost:8000/v1"},
        "distillation.teacher: expected a URL that begins with http:// or https:// and holds no user or password",
    ),
    "a teacher's address with a password": (
        {"distillation.teacher": "http://me:secret@localhost:8000/v1"},
        "distillation.teacher: expected a URL that begins with http:// or https:// and holds no user or password",
    ),
}  # fmt: skip


def test_forks_of_no_reward_are_refused_with_the_baseline_that_they_need(problems: Problems) -> None:
    found = problems({**TAUGHT, **FORKS, "distillation.reward": False})
    assert sorted(problem.split(": goes by rewards, ")[0] for problem in found) == [
        "advantages.baseline", "advantages.scale", "rollout.forks_per_episode"
    ]  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_contradiction_is_named_on_both_sides(name: str, problems: Problems) -> None:
    changes, problem = REFUSED[name]
    assert problems(changes) == [problem]


ALLOWED: dict[str, dict[str, Any]] = {
    "whole batch": {"training.batch_size": 64},
    "cosine with one step": {"optimizer.schedule": "cosine", "optimizer.warmup_steps": 39},
    "linear with a floor": {"optimizer.schedule": "linear", "optimizer.min_lr_fraction": 0.5},
    "one token for the prompt": {"rollout.max_output_tokens": 511},
    "one token for the end": {"rollout.min_output_tokens": 7},
    "last seed": {"evaluation.seeds": [2**31 - 1]},
    "samples at a temperature": {"evaluation.samples_per_task": 4, "evaluation.temperature": 0.1},
    "a sample of greedy play": {"evaluation.temperature": 0.0},
    "16 bits under an adapter": {**LORA, "model.dtype": "bfloat16"},
    "flash attention in 16 bits": {
        **LORA, "model.dtype": "bfloat16", "model.attn_implementation": "flash_attention_2"
    },
    "a revision of the hub": {"model.base": "someone/a-model", "model.revision": "refs/pr/3"},
    "prefixes if they can be, with eager attention": {"model.attn_implementation": "eager"},
    "4 bits": {"model.trainer_mode": "qlora", "training.lora": {"r": 4}},
    "just a narrow clip": {"loss.clip_low": 0.049, "loss.clip_high": 0.049},
    "a wide clip that is meant": {"loss.clip_low": 0.2, "algorithm.acknowledge": ["wide_clip"]},
    "a wide clip on a token": {**GRPO, "loss.clip_low": 0.5},
    "a wide clip on the tokens of a mean": {"loss.surrogate": "gmpo"},
    "a geometric mean of each turn": {
        "algorithm.variety": "gspo_token", "loss.unit": "turn", "loss.surrogate": "gmpo"
    },
    "probabilities that sampled the tokens": {
        **GRPO, "loss.surrogate": "dppo", "correction.old_logprobs": "rollout"
    },
    "a capped weight of each token": {**GRPO, "loss.surrogate": "cispo"},
    "a gate": {"loss.surrogate": "sapo", "loss.sapo_temperatures": [1.0, 2.0]},
    "a product over the episode": {"loss.surrogate": "vespo"},
    "lengths that are meant": {"loss.aggregation": "bnpo", "algorithm.acknowledge": ["length_weighting"]},
    "lengths with a token ratio": {**GRPO, "loss.aggregation": "dapo"},
    "turns weigh one each": {"loss.aggregation": "turn-mean-token-mean"},
    "the paper's by its other name": {"loss.aggregation": "grpo"},
    "scored truncation": {"rollout.top_p": 0.9},
    "bias that is meant": {"rollout.top_k": 20, "algorithm.acknowledge": ["truncated_sampling"]},
    "dual clip outside": {**GRPO, "loss.dual_clip": 1.28},
    "reference by itself": {"advantages.kl_shaping_coef": 0.1, "reference.placement": "shared"},
    "a copy that follows": {"loss.kl_coef": 0.1, "reference.update_every_n_iters": 3},
    "an adapter that follows by itself": {**LORA, "loss.kl_coef": 0.1, "reference.update_every_n_iters": 5},
    "an adapter that follows": {
        **LORA, "loss.kl_coef": 0.1, "reference": {"source": "adapter", "update_every_n_iters": 3}
    },
    "group of one without baseline": {"training.group_size": 1, "advantages.baseline": "none"},
    "group of one against the batch": {"training.group_size": 1, "advantages.baseline": "batch"},
    "dynamic sampling": {"training.constant_groups": "refill"},
    "choosing from ten tasks": {"training.adaptive_tasks": 10},
    "choosing from environments": {
        "training.adaptive_tasks": 0, "rollout.mixture": [{"env_name": "Wordle", "share": 0.5}]
    },
    "forks": FORKS,
    "forks in the mean of a turn": {
        **FORKS, "algorithm.variety": "gspo_token", "loss.unit": "turn", "loss.surrogate": "gmpo"
    },
    "a teacher alone": {**TAUGHT, "distillation.reward": False},
    "one episode a task of a teacher alone": {**TAUGHT, "distillation.reward": False, "training.group_size": 1},
    "defaults that follow from others, and a teacher alone": {
        **TAUGHT, "distillation.reward": False, "algorithm.variety": "gspo_token", "rewards.overlong": "mask"
    },
    "weights of an entropy beside a teacher": {
        **TAUGHT, "distillation.reward": False, **GRPO, "loss.aggregation": "token-mean", "loss.entropy_coef": 0.01
    },
    "the clip of token ratios, and a teacher alone": {**TAUGHT, **GRPO, "distillation.reward": False},
    "a policy that reads what the environment answered": {
        "distillation": {"teacher": "self", "feedback": "environment"}
    },
    "a teacher behind an endpoint": {
        "distillation.teacher": "http://localhost:8000/v1", "distillation.teacher_model": "big",
        "distillation.teacher_tokenizer": "tiny:qwen3-64", "distillation.api_key_env": "A_KEY",
    },
    "a teacher of whole distributions": {**TAUGHT, "distillation.divergence": "forward_kl"},
    "a teacher beside the reward": {**TAUGHT, "training.constant_groups": "drop", "advantages.whiten": "tokens"},
    "penalised": {"rewards.overlong": 0.5},
    "adaptive beta": {"rewards.kl_coef": 0.1, "rewards.kl_target": 0.1},
    "switched off": {"training.step_rewards_enabled": False, "training.step_rewards_mode": "off"},
    "decisions": {**DECISIONS, "training.step_rewards_beta": 0.1, "training.event_rewards_kind": "absolute"},
    "mask with both thresholds": {"correction": {"level": "turn", "mode": "mask", "low": 0.2, "high": 3.0}},
    "ppo with two steps": {"algorithm.method": "ppo", "training.batch_size": 32},
    "ppo with two epochs": {"algorithm.method": "ppo", "training.batch_size": 64, "training.update_epochs": 2},
    "as long as evaluation": {"training.max_turns": 8},
    "said twice alike": {"rollout.policy_config": {"max_tokens": 8}},
    "another run": {"model.base": ..., "model.source": "ft:other"},
    "split that adds up": SPLIT,
    "processes that need not": {**SPLIT, "compute": {"gpu_count": 0}},
    "several machines": CLUSTER,
    "servers of the local engine": {**CLUSTER, "compute": {"gpu_count": 0}, "rollout.engine": "local"},
    "the same GPUs": {
        **COLOCATED, "vllm": {"sleep_while_learning": True}, "training.weight_sync": {"direct": "ipc"}
    },
    "several machines' same GPUs": {
        "compute": {"gpu_count": 9, "nodes": 2}, **{k: v for k, v in DEDICATED.items() if k in ("loss", "reference")},
        "topology": {"type": "colocated", "gpus_for_vllm": 8, "gpus_for_training": 4, "gpus_for_ref": 1},
    },
    "reference of its own": DEDICATED,
    "one GPU": {"compute": {"gpu_count": 1, "gpu_type": "H200"}},
    "no GPU": {"compute": {"gpu_count": 0}},
    "sent weights": {
        "vllm": {}, "training.weight_sync": {"verify_every_k": 3}, "training.weight_sync_interval": 2, **STALE
    },
    "rescored": RESCORED,
    "rescored, with what changes nothing": {
        **RESCORED, "services": {**ENDPOINT, "engine_model": "teacher"},
        "correction": {"old_logprobs": "recompute", "level": "none"},
        "training.weight_sync": {"mode": "direct", "direct": True, "verify_every_k": 0},
    },
    "stale samples with a weight": {"training.max_staleness": 2, "correction.level": "trajectory"},
    "tensors": {"vllm": {}, **HANDED_OVER},
    "merged tensors": {"vllm": {}, **LORA, "training.weight_sync": {"direct": "shared_memory", "mode": "full"}},
    "tensors of an adapter, which auto merges": {"vllm": {}, **LORA, **HANDED_OVER},
    "tensors on one GPU": {"vllm": {}, "training.weight_sync": {"direct": "ipc"}},
    "tensors to other GPUs": {**SPLIT, "training.weight_sync": {"direct": "nccl"}},
    "shared weights as the hosted trainer says it": {
        "training.weight_sync": {
            "enable": True, "targets": ["policy"], "mode": "direct", "direct": True, "verify_every_k": 0
        }
    },
    "two sinks": {"tracking": {"report_to": ["wandb", "tensorboard"], "wandb_project": "p"}},
}  # fmt: skip


@pytest.mark.parametrize("name", ALLOWED)
def test_just_inside_every_contradiction_is_fine(name: str, make: Make) -> None:
    assert make(ALLOWED[name])


def test_two_rules_may_speak_about_one_file(problems: Problems) -> None:
    lines = problems({"loss.unit": "token", "training.batch_size": 24})
    assert [line.split(":")[0] for line in lines] == ["training.batch_size", "loss.unit"]


def test_a_rule_waits_for_a_value_that_is_wrong_by_itself_and_for_nothing_else(make: Make) -> None:
    record = partial_record(RunRecord, make({}).model_dump(), frozenset({"loss.unit"}))
    assert problems_of([Rule("loss.unit", lambda c: c.loss.unit)], record) == []
    assert problems_of([Rule("loss.unit", lambda c: c.model.label)], record) == [Problem("loss.unit", "quickstart")]
    with pytest.raises(AttributeError, match="no attribute 'units'"):
        problems_of([Rule("loss.unit", lambda c: c.loss.units)], record)  # type: ignore[attr-defined]
