"""Training on what an endpoint with text only samples (rollout.rescore), against a real server on loopback.

Pinned here:
1. a step is what an independent computation makes of the recorded tokens and the learner's own logprobs;
2. nothing is reported that compares with the sampler's logprobs, which are zeros;
3. evaluations are of the learner's weights, in a run and after it, and need no endpoint;
4. every record says who sampled;
5. a resumed run ends with the very weights of an uninterrupted one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from faulty_server import FaultyServer
from guessing_endpoint import guessing
from safetensors.torch import load_file

from gspo_gym.base.files import read_lines
from gspo_gym.cli.evaluate import run_evaluation
from gspo_gym.cli.train import run_training
from gspo_gym.config.build import trainer as build
from gspo_gym.config.run_config import RunConfig
from gspo_gym.errors import ConfigError
from gspo_gym.learning.settings import CorrectionSettings, LossSettings, OptimizerSettings, UpdateSettings
from gspo_gym.learning.update import Learner
from gspo_gym.rollout.episode_files import read_episodes
from gspo_gym.run.records import read_events, read_metrics, read_summary
from gspo_gym.types import Trajectory

Values = dict[str, Any]
# Halves the range every second time: its episodes differ, so that groups teach something.
ENDPOINT = guessing(0.5)


def config(folder: Path, url: str, **changes: Any) -> RunConfig:
    """Keys with __ for the dot."""
    values: Values = {
        "run": {"folder": str(folder)},
        "algorithm": {"variety": "gspo"},
        "services": {"engine_urls": [url]},
        "model": {"base": "tiny:qwen3-64", "label": "rescored"},
        "rollout": {"env_name": "GuessNumber", "env_config": {"style": "terse"},
                    "max_turns": 4, "max_output_tokens": 3, "max_model_len": 256,
                    "episodes_per_batch": 16, "engine": "http", "rescore": True},
        "training": {"iterations_per_epoch": 1, "group_size": 4, "batch_size": 16, "learning_rate": 0.5,
                     "checkpoint_every_n_iters": 1},
        # smooth in the gradient, where AdamW's own first step is its sign
        "optimizer": {"eps": 1.0, "max_grad_norm": 1e6},
        "evaluation": {"seeds": "0:4", "every_n_iters": 2},
    }  # fmt: skip
    for key, value in changes.items():
        section, name = key.split("__")
        values.setdefault(section, {})[name] = value
    return RunConfig.from_dict(values)


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "rescored" / "checkpoints" / f"step_{step:06d}" / "model.safetensors")


def played(folder: Path, name: str) -> list[Trajectory]:
    return read_episodes(folder / "rescored" / "episodes" / f"{name}.jsonl.gz")


def logprobs_of(model: torch.nn.Module, episode: Trajectory) -> torch.Tensor:
    """[A] of the sampled tokens, by one plain forward pass."""
    (segment,) = episode.segments
    ids = torch.tensor(segment.token_ids.tolist())
    mask = torch.tensor(segment.action_mask.tolist())
    rows = model(ids[None]).logits[0, :-1].log_softmax(-1)
    return rows.gather(-1, ids[1:, None])[:, 0][mask[1:]]


def test_a_step_is_taken_with_the_learners_own_logprobs_on_the_endpoints_tokens(tmp_path: Path) -> None:
    with FaultyServer(dialect="text", write=ENDPOINT) as server:
        settings = config(tmp_path, server.base_url, advantages__scale="none")
        run_training(settings)
        prompts = [seen.body["prompt"] for seen in server.seen if "stop" in seen.body]
    model = build.build_policy(settings).model  # the weights that the run began with
    episodes = played(tmp_path, "step_000001")
    spoken = {m.content for each in episodes for m in each.messages if m.role == "assistant"}
    assert spoken <= set("12345678")  # which random weights would not say
    assert any("higher" in prompt for prompt in prompts)
    # With old logprobs equal to the present ones every ratio is 1, and GSPO's gradient is that of the mean over
    # episodes of advantage x mean logprob (eq. 10 of the paper at s = 1).
    loss = torch.zeros(())
    for k in range(0, 16, 4):
        group = episodes[k : k + 4]
        mean = sum(each.reward for each in group) / 4
        for each in group:
            loss = loss - (each.reward - mean) * logprobs_of(model, each).mean() / 16
    loss.backward()  # type: ignore[no-untyped-call]
    after = weights(tmp_path, 1)
    largest = 0.0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        gradient = parameter.grad.double()
        # Adam's first step with its moments corrected: m = g and v = g * g
        step = 0.5 * gradient / (gradient.abs() + 1.0)
        largest = max(largest, float(step.abs().max()))
        expected = parameter.detach().double() - step
        if name in after:  # tied weights are saved once
            torch.testing.assert_close(after[name].double(), expected, rtol=0, atol=1e-6)
    assert largest > 1e-3  # a thousand times the tolerance


def test_nothing_is_compared_with_logprobs_that_are_zeros(tmp_path: Path) -> None:
    with FaultyServer(dialect="text", write=ENDPOINT) as server:
        run_training(config(tmp_path, server.base_url, training__batch_size=8))
    (line,) = read_metrics(tmp_path / "rescored")
    assert not [name for name in line if name.startswith(("kl/rollout", "correction/"))]
    assert not {"ratio/noise_sigma", "ratio/predicted_noise", "ratio/noise_clip_fraction"} & set(line)
    # Two steps: the old logprobs are scored before the first, in which every ratio is 1 (its logprobs, some -5, would
    # make it e^-5 against zeros), and at the second the policy has moved.
    assert line["optim/num_steps"] == 2
    assert line["ratio/noise_floor"] < 1e-6
    assert line["ratio/is_constant"] == 0
    assert line["batch/trained_tokens"] > 0


def test_every_record_says_who_sampled(tmp_path: Path) -> None:
    with FaultyServer(dialect="text", write=ENDPOINT) as server:
        run_training(config(tmp_path, server.base_url, training__iterations_per_epoch=2))
        url = server.base_url
    folder = tmp_path / "rescored"
    (event,) = [event for event in read_events(folder) if event["kind"] == "rescored"]
    assert (event["step"], event["data"]) == (0, {"urls": [url], "logprob_mode": "none"})
    assert read_summary(folder)["rescored"] is True
    for name in ("step_000001", "step_000002", "eval_000000", "eval_000002"):
        is_known = name.startswith("eval")
        lines = [json.loads(line) for line in read_lines(folder / "episodes" / f"{name}.jsonl.gz")]
        assert {line["knows_weights"] for line in lines} == {is_known}
        for (segment,) in (episode.segments for episode in played(tmp_path, name)):
            assert set(segment.weight_version[segment.action_mask]) == {int(name[-1]) if is_known else -1}
            assert segment.rollout_logprobs[segment.action_mask].any() == is_known


def test_an_evaluation_is_of_the_learners_weights_and_needs_no_endpoint(tmp_path: Path) -> None:
    with FaultyServer(dialect="text", write=guessing(1.0)) as server:
        settings = config(tmp_path, server.base_url)
        summary = run_training(settings)
        endpoint = run_evaluation(config(tmp_path, server.base_url, rollout__rescore=False))
        num_seen = len(server.seen)
        assert run_evaluation(settings).summary()["mean_return"] == summary["initial_eval"]["mean_return"]
        assert len(server.seen) == num_seen
    # Halving 1-8 finds the number within four guesses; random bytes hardly ever are one.
    assert endpoint.success_rate == 1.0
    assert summary["initial_eval"]["success_rate"] == 0.0
    checkpoint = str(tmp_path / "rescored" / "checkpoints" / "step_000001")
    again = run_evaluation(settings, model=checkpoint)
    assert again.summary()["mean_return"] == summary["final_eval"]["mean_return"]


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    with FaultyServer(dialect="text", write=ENDPOINT) as server:
        run_training(config(tmp_path / "whole", server.base_url, training__iterations_per_epoch=4))
        run_training(config(tmp_path / "parts", server.base_url, training__iterations_per_epoch=2))
        run_training(config(tmp_path / "parts", server.base_url, training__iterations_per_epoch=4), resume=True)
    whole, parts = weights(tmp_path / "whole", 4), weights(tmp_path / "parts", 4)
    assert whole.keys() == parts.keys()
    assert all(whole[name].equal(parts[name]) for name in whole)  # bit for bit
    before = weights(tmp_path / "parts", 3)  # of which two checkpoints are kept
    assert any(not before[name].equal(parts[name]) for name in before)
    events = read_events(tmp_path / "parts" / "rescored")
    assert [event["step"] for event in events if event["kind"] == "rescored"] == [0, 2]


@pytest.mark.slow
def test_token_ids_are_taken_where_the_endpoint_gives_them_and_its_logprobs_are_not_used(tmp_path: Path) -> None:
    hot = {"rollout__temperature": 0.5, "rollout__max_output_tokens": 1, "training__batch_size": 8}
    runs: dict[str, tuple[list[Trajectory], dict[str, torch.Tensor]]] = {}
    modes: tuple[Literal["processed", "raw"], ...] = ("processed", "raw")
    for mode in modes:
        with FaultyServer(logprobs=mode, vocab_size=512) as server:
            run_training(config(tmp_path / mode, server.base_url.removesuffix("/v1"), **hot))
        (event,) = [event for event in read_events(tmp_path / mode / "rescored") if event["kind"] == "rescored"]
        assert event["data"]["logprob_mode"] == mode
        (line,) = read_metrics(tmp_path / mode / "rescored")
        assert line["optim/num_steps"] == 2
        assert "kl/rollout_k3" not in line
        runs[mode] = played(tmp_path / mode, "step_000001"), weights(tmp_path / mode, 1)
    (processed, first), (raw, second) = runs.values()
    for one, other in zip(processed, raw, strict=True):  # the same samples, of which the endpoints say other things
        assert one.segments[0].token_ids.tolist() == other.segments[0].token_ids.tolist()
        assert one.segments[0].rollout_logprobs.tolist() != other.segments[0].rollout_logprobs.tolist()
    assert all(first[name].equal(second[name]) for name in first)


def test_a_learner_that_rescores_refuses_to_look_at_the_samplers_logprobs() -> None:
    policy = build.load_policy("tiny:qwen3-64")
    for correction in ({"old_logprobs": "rollout"}, {"level": "token"}, {"off_policy_threshold": 0.1}):
        with pytest.raises(ConfigError, match=r"looks at the sampler's logprobs, which rollout\.rescore"):
            Learner(
                policy.model,
                optimizer=OptimizerSettings(),
                loss=LossSettings(),
                update=UpdateSettings(learning_rate=1e-3),
                minibatch_size=4,
                correction=CorrectionSettings(**correction),
                rescores=True,
            )
