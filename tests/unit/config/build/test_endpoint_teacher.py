"""A teacher behind an endpoint: `gspo-gym models serve` in a process, which scores as the same model here does.

Pinned here:
1. logprobs are those of the same weights in this process, and training ends with the same weights;
2. one request an episode, up to its last sampled token;
3. another vocabulary, or one that cannot be proved, is refused before anything is played;
4. another model under the same name is refused, in a run and when one goes on;
5. an answer that cannot be believed, or none, ends the step, and `--resume` goes on.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from served_teacher import Relay, serving
from small_run import small_run

from gspo_gym.base.retries import RetrySettings
from gspo_gym.cli.train import run_training
from gspo_gym.cli.verify import verify_step
from gspo_gym.config.build.reference import check_teacher, load_teacher
from gspo_gym.config.build.teacher import find_teacher
from gspo_gym.config.run_config import RunConfig
from gspo_gym.errors import ConfigError, ServiceError
from gspo_gym.learning.batching import TokenBatch
from gspo_gym.learning.logprobs import LogprobComputer
from gspo_gym.policy.endpoint import EndpointTeacher
from gspo_gym.policy.load import load_policy, save_policy, vocabulary_digest
from gspo_gym.policy.manifest import sha256_of
from gspo_gym.rollout.episode_files import read_episodes
from gspo_gym.run.records import read_events, read_metrics, read_summary, read_teacher
from gspo_gym.run.tokens import open_tokens

ONCE = RetrySettings(max_attempts=1)
STUDENT, NAME = "tiny:qwen3-64", "teacher"
# float32 in rows of other widths; a logprob of the same weights is the same up to that.
LOGPROB_GAP = 1e-5
# A step moves a weight by learning_rate * g / (|g| + 1), and g by 1e-5 where a logprob of the teacher is off by that.
WEIGHT_GAP = 0.5 * LOGPROB_GAP


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The teacher's weights."""
    folder = tmp_path_factory.mktemp("models") / NAME
    save_policy(load_policy("tiny:qwen3-64@5"), folder)
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with serving(str(folder), "--name", NAME) as (url, _):
        yield url


def config_of(tmp_path: Path, teacher: str, label: str = "test", **distillation: Any) -> RunConfig:
    """Two steps, smooth in the gradient, where AdamW's own first step is its sign."""
    return RunConfig.from_dict(
        small_run(
            model={"label": label},
            run={"folder": str(tmp_path), "log_tokens_every_n_iters": 1},
            training={"learning_rate": 0.5, "checkpoint_every_n_iters": 1, "keep_last": 3},
            optimizer={"eps": 1.0, "max_grad_norm": 1e6},
            distillation={"teacher": teacher, **distillation},
        )
    )


def weights(folder: Path, step: int = 2) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step_{step:06d}" / "model.safetensors")


def require_close(folder: Path, other: Path) -> None:
    before = dict(load_policy(STUDENT).model.named_parameters())
    moved = 0.0
    for name, tensor in weights(folder).items():
        torch.testing.assert_close(tensor, weights(other)[name], rtol=0, atol=WEIGHT_GAP)
        moved = max(moved, float((tensor - before[name].detach()).abs().max()))
    assert moved > 100 * WEIGHT_GAP


def some_batch() -> TokenBatch:
    """Two rows with two turns each, of which the policy sampled all but the first tokens; the second is shorter."""
    ids = torch.tensor([[11, 12, 13, 14, 15, 16, 17], [21, 22, 23, 24, 25, 0, 0]])
    actions = torch.tensor([[0, 0, 1, 1, 0, 1, 0], [0, 1, 0, 1, 0, 0, 0]], dtype=torch.bool)
    return TokenBatch(
        token_ids=ids,
        attention_mask=ids > 0,
        action_mask=actions,
        turn_index=torch.where(actions, 0, -1),
        trajectory_index=torch.tensor([0, 1]),
        rollout_logprobs=torch.zeros(ids.shape),
    )


@pytest.mark.slow
def test_training_by_an_endpoint_is_training_by_the_same_model_here(tmp_path: Path, folder: Path, url: str) -> None:
    run_training(config_of(tmp_path, str(folder), "here"))
    relay = Relay(url)
    with relay.running() as relayed:
        run_training(config_of(tmp_path, relayed, "there"))
    here, there = tmp_path / "here", tmp_path / "there"
    for step in (1, 2):
        own, theirs = (open_tokens(run, step).columns() for run in (here, there))
        ratios = own["teacher_log_ratio"], theirs["teacher_log_ratio"]
        assert np.nanmax(np.abs(ratios[0])) > 1e4 * LOGPROB_GAP, "these are two models"
        np.testing.assert_allclose(*ratios, rtol=0, atol=LOGPROB_GAP)
        assert [read_metrics(run)[step - 1]["distillation/kl"] for run in (here, there)] == [
            pytest.approx(float(np.mean(np.expm1(r[~np.isnan(r)]) - r[~np.isnan(r)])), rel=1e-4) for r in ratios
        ]
    require_close(here, there)
    # An episode is a request, and no further token of it; the same short prompt comes before every step, and at first.
    probe, expected = list(range(11, 27)), []
    for step in (1, 2):
        expected.append(probe)
        for episode in read_episodes(there / "episodes" / f"step_{step:06d}.jsonl.gz"):
            for segment in episode.segments:
                last = int(np.flatnonzero(segment.action_mask)[-1])
                expected.append(segment.token_ids[: last + 1].tolist())
    assert sorted(relay.prompts) == sorted([probe, *expected])
    verified = verify_step(there, 1)
    assert verified.difference is None
    (missing,) = verified.missing
    assert re.match(r"logprobs of the teacher: they are of the endpoint http\S+, which is not asked again", missing)
    facts = read_teacher(there)
    assert facts is not None
    assert (facts["model"], facts["weights_sha256"]) == (NAME, sha256_of(folder / "model.safetensors"))
    assert facts["weights_sha256"] == read_teacher(here)["weights_sha256"]  # type: ignore[index]


@pytest.mark.slow
def test_a_server_that_dies_in_a_step_ends_it_and_the_run_goes_on_with_another(tmp_path: Path, folder: Path) -> None:
    with serving(str(folder), "--name", NAME) as (url, process):
        relay, first = Relay(url), 1 + 1 + 8  # the prompts of the start and of the first step of eight episodes

        def die(number: int) -> None:
            if number == first + 1 + 3:  # when three episodes of the second step are answered or on their way
                process.kill()
                process.wait(30)

        relay.on_prompt = die
        reason = r"distillation\.teacher: .*were not learned from.*--resume"
        with relay.running() as relayed, pytest.raises(ServiceError, match=reason):
            run_training(config_of(tmp_path, relayed))
    run = tmp_path / "test"
    assert read_summary(run)["status"] == "failed"
    assert [line["step"] for line in read_metrics(run)] == [1]
    with serving(str(folder), "--name", "renamed") as (url, _):
        run_training(config_of(tmp_path, url), resume=True)
        assert [line["step"] for line in read_metrics(run)] == [1, 2]
        run_training(config_of(tmp_path, url, "whole"))
    require_close(run, tmp_path / "whole")
    assert [event["step"] for event in read_events(run) if event["kind"] == "teacher"] == [0, 1]


@pytest.mark.slow
def test_another_vocabulary_is_refused_before_anything_is_played(tmp_path: Path) -> None:
    with (
        serving("tiny:qwen3-64-v2") as (url, _),
        pytest.raises(ConfigError, match=r"has another vocabulary than the model \(SHA-256 \w{12} and \w{12}\)"),
    ):
        run_training(config_of(tmp_path, url))
    assert not (tmp_path / "test").exists()


@pytest.mark.slow
def test_a_run_that_goes_on_refuses_another_teacher(tmp_path: Path, folder: Path, url: str) -> None:
    values = config_of(tmp_path, url).model_dump(exclude_none=True)
    values["training"]["iterations_per_epoch"] = 1
    run_training(RunConfig.from_dict(values))
    other = tmp_path / "other"
    save_policy(load_policy("tiny:qwen3-64@6"), other)
    with (
        serving(str(other), "--name", NAME) as (elsewhere, _),
        pytest.raises(ConfigError, match=r"a run has one teacher.*weights_sha256 '\w{64}' became '\w{64}'"),
    ):
        run_training(config_of(tmp_path, elsewhere), resume=True)
    with pytest.raises(ConfigError, match=r"distillation\.coefficient: 1\.0 became 2\.0"):
        run_training(config_of(tmp_path, url, coefficient=2.0), resume=True)
    # The same weights in this process are the same teacher.
    run_training(config_of(tmp_path, str(folder)), resume=True)


def test_logprobs_are_those_of_the_sampled_tokens_whatever_is_prepared(folder: Path, url: str) -> None:
    batch, model = some_batch(), load_policy(str(folder)).model
    expected = LogprobComputer(model).compute(batch.token_ids, batch.attention_mask, batch.action_mask).logprobs
    teacher = EndpointTeacher(url)
    teacher.prepare([batch, other := some_batch()])
    for prepared in (other, batch, some_batch()):  # the last is asked for now
        logprobs = teacher.logprobs(prepared)
        assert not logprobs[~batch.action_mask].any()
        torch.testing.assert_close(logprobs, expected.detach(), rtol=0, atol=LOGPROB_GAP)


def without_logprobs(answer: Any) -> None:
    del answer["choices"][0]["prompt_logprobs"]


def of_fewer_tokens(answer: Any) -> None:
    answer["choices"][0]["prompt_logprobs"].pop()


def of_another_token(answer: Any) -> None:
    answer["choices"][0]["prompt_logprobs"][-1] = {"3": {"logprob": -1.0}}


def of_a_logit(answer: Any) -> None:
    entries = answer["choices"][0]["prompt_logprobs"]
    entries[-1] = {token: {"logprob": 2.5} for token in entries[-1]}


def impossible(answer: Any) -> None:
    entries = answer["choices"][0]["prompt_logprobs"]
    entries[-1] = {token: {"logprob": -9999.0} for token in entries[-1]}


def not_a_number(answer: Any) -> None:
    entries = answer["choices"][0]["prompt_logprobs"]
    entries[-1] = {token: {"logprob": float("nan")} for token in entries[-1]}


def of_another_prompt(answer: Any) -> None:
    answer["choices"][0]["prompt_token_ids"].insert(0, 1)


def of_other_weights(answer: Any) -> None:
    answer["system_fingerprint"] = "0" * 64


BROKEN: dict[str, tuple[Callable[[Any], None], str]] = {
    "an endpoint of samples only": (without_logprobs, r"expected prompt_logprobs of 16 tokens, got None; vLLM and"),
    "one token fewer": (of_fewer_tokens, r"expected prompt_logprobs of 16 tokens, got \["),
    "an alternative": (of_another_token, r"expected a finite logprob <= 0 of token 26 at 15, got None"),
    "a logit": (of_a_logit, r"expected a finite logprob <= 0 of token 26 at 15, got 2\.5"),
    "a probability of 0": (impossible, r"expected a finite logprob <= 0 of token 26 at 15, got -9999\.0"),
    "NaN": (not_a_number, r"expected a finite logprob <= 0 of token 26 at 15, got nan"),
    "a token put before the prompt": (of_another_prompt, r"expected prompt_token_ids as they were sent"),
    "other weights than are listed": (of_other_weights, r"of the weights '0+\.*'?.*, expected those of teacher"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_answer_that_cannot_be_believed_is_an_error(name: str, url: str) -> None:
    change, reason = BROKEN[name]
    relay = Relay(url)
    relay.change_answer = change
    with relay.running() as relayed, pytest.raises(ServiceError, match=reason):
        EndpointTeacher(relayed, retries=ONCE).prepare([some_batch()])


@pytest.mark.slow
def test_a_model_that_changes_under_a_run_is_refused(tmp_path: Path, url: str) -> None:
    other = tmp_path / "other"
    save_policy(load_policy("tiny:qwen3-64@6"), other)
    relay = Relay(url)
    with serving(str(other), "--name", NAME) as (elsewhere, _), relay.running() as relayed:
        teacher = EndpointTeacher(relayed, retries=ONCE)
        teacher.prepare([some_batch()])
        relay.target = elsewhere
        with pytest.raises(ServiceError, match=r"serves another model than before \(weights '\w{64}' became"):
            teacher.prepare([some_batch()])
        relay.target = url
        teacher.prepare([some_batch()])


def as_vllm(relay: Relay, **card: Any) -> None:
    """Let the served model look like vLLM's: no digests, `root` as the folder, and a token is to be sampled."""

    def change_card(answer: Any) -> None:
        (entry,) = answer["data"]
        for name in ("vocabulary_sha256", "weights_sha256", "root"):
            entry.pop(name)
        entry.update(card)

    def change_request(body: Any) -> None:
        assert body["max_tokens"] == 1
        body["max_tokens"] = 0

    relay.change_card, relay.change_request = change_card, change_request


def test_other_weights_of_a_server_that_names_none_are_found_by_a_prompt(url: str) -> None:
    relay = Relay(url)
    as_vllm(relay)
    with relay.running() as relayed:
        teacher = EndpointTeacher(relayed, retries=ONCE)
        teacher.prepare([some_batch()])

        def lower(answer: Any) -> None:
            for entries in answer["choices"][0]["prompt_logprobs"][1:]:
                for entry in entries.values():
                    entry["logprob"] -= 0.6

        relay.change_answer = lower
        with pytest.raises(ServiceError, match=r"logprobs that are 0\.6 nats from those at first \(at most 0\.5\)"):
            teacher.prepare([some_batch()])


@pytest.mark.slow
def test_a_vocabulary_is_proved_by_the_folder_that_a_server_names_or_by_the_key(
    tmp_path: Path, folder: Path, url: str
) -> None:
    student = load_policy(STUDENT)
    digest = vocabulary_digest(student.tokenizer)

    def found(card: dict[str, Any], **keys: Any) -> dict[str, Any] | str:
        relay = Relay(url)
        as_vllm(relay, **card)
        with relay.running() as relayed:
            try:
                teacher = asyncio.run(find_teacher(config_of(tmp_path, relayed, **keys), student))
            except ConfigError as error:
                return str(error)
        assert teacher is not None
        return dict(teacher.facts)

    of_root = found({"root": str(folder)})
    assert isinstance(of_root, dict)
    weights_sha256 = sha256_of(folder / "model.safetensors")
    assert (of_root["vocabulary_sha256"], of_root["weights_sha256"]) == (digest, weights_sha256)
    of_key = found({}, teacher_tokenizer=str(folder))
    assert isinstance(of_key, dict)
    assert (of_key["vocabulary_sha256"], "weights_sha256" in of_key) == (digest, False)
    assert re.search(
        "does not say which tokenizer teacher has.*name it in distillation.teacher_tokenizer", str(found({}))
    )
    gone = found({"root": "/no/such/folder"})
    assert re.match(
        r"distillation\.teacher: the tokenizer '/no/such/folder' of teacher .* cannot be loaded here", str(gone)
    )
    other = found({"root": str(folder)}, teacher_tokenizer="tiny:qwen3-64-v2")
    assert "has another vocabulary than the model" in str(other)
    short = found({"root": str(folder), "max_model_len": 256})  # and the token that vLLM samples
    assert "reads 256 tokens, expected 257 for rollout.max_model_len = 256" in str(short)


@pytest.mark.slow
def test_keys_and_names_reach_the_endpoint(
    tmp_path: Path, folder: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(where: str, **keys: Any) -> Any:
        return asyncio.run(find_teacher(config_of(tmp_path, where, **keys), load_policy(STUDENT)))

    assert find(url, teacher_model=NAME).facts["model"] == NAME
    with pytest.raises(ConfigError, match=r"teacher_model: expected 'big' at .*, which lists teacher; name one"):
        find(url, teacher_model="big")
    with pytest.raises(ConfigError, match="publishes its vocabulary's digest, which is believed more: remove this"):
        find(url, teacher_tokenizer=str(folder))
    monkeypatch.delenv("TEACHERS_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"distillation\.api_key_env: expected a key in the variable TEACHERS_KEY"):
        check_teacher(config_of(tmp_path, url, api_key_env="TEACHERS_KEY"), STUDENT)
    with serving(str(folder), "--api-key-env", "A_KEY", A_KEY="right") as (guarded, _):
        monkeypatch.setenv("TEACHERS_KEY", "right")
        assert find(guarded, api_key_env="TEACHERS_KEY").facts["weights_sha256"]
        with pytest.raises(ServiceError, match=r"distillation\.teacher: http\S+/v1/models: HTTP 401"):
            find(guarded)
    without_v1 = r"HTTP 404: .*Expected the URL, up to and with /v1, of a server that gives prompt_logprobs"
    with pytest.raises(ServiceError, match=without_v1):
        find(url.removesuffix("/v1") + "/other")


def test_an_endpoint_that_is_not_there_is_asked_when_it_is_needed_and_named(tmp_path: Path) -> None:
    config = config_of(tmp_path, "http://127.0.0.1:9/v1")
    check_teacher(config, STUDENT)  # nothing is asked yet
    teacher = load_teacher(config, load_policy(STUDENT), "cpu")
    assert isinstance(teacher, EndpointTeacher)
    with pytest.raises(
        ServiceError, match=r"distillation\.teacher: http://127\.0\.0\.1:9/v1/models: connection failed"
    ):
        EndpointTeacher(teacher.url, retries=ONCE).prepare([some_batch()])
