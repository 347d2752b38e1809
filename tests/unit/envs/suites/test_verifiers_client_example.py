"""An engine as verifiers' client, over a stand-in of the package: what was sampled arrives as it was sampled.

The tiny tokenizer's ids are bytes, 258 ends a turn. The real package is in tests/foreign.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from gspo_gym_envs.suites.verifiers import forget_loaded
from verifiers_client import verifiers_client

from gspo_gym.engine.scripted import Failures, ScriptedEngine
from gspo_gym.env.registry import make
from gspo_gym.errors import MissingExtraError
from gspo_gym.policy.load import tiny_tokenizer
from gspo_gym.rollout.adapter import TokenObservationWrapper

END = 258  # <|im_end|>


@pytest.fixture(autouse=True)
def fake_verifiers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "fake_verifiers"))
    _forget_modules()
    yield
    _forget_modules()
    forget_loaded()


def _forget_modules() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("verifiers", "vf_counting")]:
        del sys.modules[name]


def ids(text: str, *, is_closed: bool = True) -> list[int]:
    return [*text.encode(), *([END] if is_closed else [])]


def rolled_out(
    engine: ScriptedEngine, sampling_args: Mapping[str, Any] | None = None, *, num_rollouts: int = 1, **env_args: Any
) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
    """The last output of several rollouts of row 0, one after the other, and the tokens of all turns."""
    import verifiers

    env = verifiers.load_environment("vf-counting", **env_args)
    turns: list[dict[str, Any]] = []
    score = env.rubric.score_rollout

    async def keep(state: Any) -> None:
        turns.extend(step["tokens"] for step in state["trajectory"])
        await score(state)

    env.rubric.score_rollout = keep
    client = verifiers_client(engine, tiny_tokenizer(), max_tokens=16)

    async def run() -> Mapping[str, Any]:
        for _ in range(num_rollouts):
            output = await env.run_rollout(dict(env.dataset[0]), client, "policy", sampling_args or {})
        return output  # type: ignore[no-any-return]

    return asyncio.run(run()), turns


def test_ids_and_logprobs_arrive_as_they_were_sampled() -> None:
    engine = ScriptedEngine([ids("1"), ids("2")], logprob=-0.25)
    output, turns = rolled_out(engine)
    assert output["metrics"]["right"] == 1.0
    assert [turn["completion_ids"] for turn in turns] == [ids("1"), ids("2")]
    assert [turn["completion_logprobs"] for turn in turns] == [[-0.25, -0.25]] * 2
    for turn, call in zip(turns, engine.calls, strict=True):
        assert turn["prompt_ids"] == list(call.prompt_token_ids)
        assert turn["prompt_mask"] == [0] * len(turn["prompt_ids"])
        assert turn["completion_mask"] == [1, 1]


def test_a_turn_extends_the_one_before_and_what_was_sampled_is_not_rendered_again() -> None:
    spelt = ids(" 1\n")  # a template that trims would render it as "1"
    _, [first, second] = rolled_out(ScriptedEngine([spelt, ids("2")]))
    known = [*first["prompt_ids"], *spelt]
    assert second["prompt_ids"][: len(known)] == known
    assert b"next" in bytes(token for token in second["prompt_ids"][len(known) :] if token < 256)


def test_an_answer_that_the_limit_cut_off_is_closed_in_the_next_prompt() -> None:
    cut = ids("x" * 16, is_closed=False)
    engine = ScriptedEngine([cut, ids("2")])
    _, [first, second] = rolled_out(engine)
    known = [*first["prompt_ids"], *cut]
    assert second["prompt_ids"][: len(known) + 1] == [*known, END]


def test_sampling_arguments_reach_the_engine_by_their_names_here() -> None:
    engine = ScriptedEngine([ids("2")])
    asked = {"max_completion_tokens": 5, "temperature": 0.5, "n": 1, "logprobs": True, "extra_body": {"top_k": 3}}
    rolled_out(engine, {**asked, "top_p": None}, max_turns=1)
    sampling = engine.calls[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (5, 0.5, 3, 1.0)
    assert sampling.stop_token_ids[0] == END


def test_every_turn_of_every_rollout_has_a_seed_of_its_own_and_the_same_in_the_next_run() -> None:
    def seeds() -> list[int]:
        engine = ScriptedEngine([ids("1"), ids("2")] * 3)
        rolled_out(engine, num_rollouts=3)
        return [call.sampling.seed for call in engine.calls]

    assert len(set(seeds())) == 6
    assert seeds() == seeds()


@pytest.mark.parametrize(
    ("sampling_args", "text"),
    [({"top_q": 1}, "unknown argument 'top_q'; did you mean 'top_p'"), ({"n": 2}, "expected n = 1, got 2")],
)
def test_arguments_that_would_be_ignored_fail_the_rollout(sampling_args: dict[str, Any], text: str) -> None:
    output, _ = rolled_out(ScriptedEngine([ids("2")]), sampling_args)
    assert type(output["error"]).__name__ == "ModelError"
    assert text in str(output["error"])


def test_failures_are_those_of_verifiers() -> None:
    output, _ = rolled_out(ScriptedEngine([ids("2")], failures=Failures(every=1)))
    assert str(output["error"]) == "EngineError: scripted failure of call 1"
    output, turns = rolled_out(ScriptedEngine([ids("2")], max_model_len=8))
    assert (output["error"], output["stop_condition"], turns) == (None, "prompt_too_long", [])


def test_tool_calls_are_parsed_and_their_answers_extend_the_prompt() -> None:
    said = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    engine = ScriptedEngine([ids(said), ids("2")])
    client_args = {"kind": "tools", "max_turns": 2}
    import verifiers

    env = verifiers.load_environment("vf-counting", **client_args)
    client = verifiers_client(engine, tiny_tokenizer(), max_tokens=200)
    output = asyncio.run(env.run_rollout(dict(env.dataset[0]), client, "policy", {}))
    [asked, answered, last] = output["completion"]
    assert [(call.name, call.arguments) for call in asked.tool_calls] == [("add", '{"a": 1}')]
    assert (answered.role, answered.content, last.content) == ("tool", '{"a": 1}', "2")
    first, second = (list(call.prompt_token_ids) for call in engine.calls)
    assert second[: len(first) + len(ids(said))] == [*first, *ids(said)]


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'gspo-gym\[envs-verifiers\]'"):
        verifiers_client(ScriptedEngine([]), tiny_tokenizer())


def test_the_other_way_an_episode_of_theirs_is_a_masked_record_like_any() -> None:
    env = make("Verifiers", env_id="vf-counting", env_args={"kind": "tools"})
    with TokenObservationWrapper(env, tiny_tokenizer(), 4, 0, 2048, 200) as wrapper:
        prompt, _ = wrapper.reset(seed=2**31)
        assert b"add" in bytes(token for token in prompt if token < 256)  # the tools are in the prompt
        said = ids('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
        longer, reward, *_ = wrapper.step(said)
        assert longer[: len(prompt) + len(said)].tolist() == [*prompt, *said]
        assert reward is None
        _, reward, terminated, _, _ = wrapper.step(ids("2"))
        record = wrapper.episode()
    assert (reward, terminated) == (1.0, True)
    [segment] = record.segments
    assert segment.token_ids[segment.action_mask].tolist() == [*said, *ids("2")]
