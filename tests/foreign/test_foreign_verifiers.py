"""verifiers 0.1.14, both ways: its environments played here, and engines of ours played in its loop.

The environments are `verifiers_envs/*.py`. Expected texts and rewards follow from what is written there.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gspo_gym_envs.suites.verifiers import forget_loaded
from verifiers_client import verifiers_client

from gspo_gym.config.build.episode_collection import collect_episodes
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.engine.scripted import ScriptedEngine
from gspo_gym.env.checks.checker import check_env
from gspo_gym.env.playing import Playthrough, play, replaying
from gspo_gym.env.registry import make
from gspo_gym.errors import ConfigError, EnvError
from gspo_gym.policy.load import tiny_tokenizer
from gspo_gym.policy.tiny import build_tiny
from gspo_gym.types import Message, ToolCall

# What the package and its dependencies warn of is not ours to mend.
pytestmark = [pytest.mark.verifiers, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

FIRST = 2**31  # the first training seed
END = 258  # ends a turn of the tiny tokenizer, whose other ids are bytes
ENVIRONMENTS = ("vf-sums", "vf-guess", "vf-calculator", "vf-several")


@pytest.fixture(autouse=True)
def environments_on_the_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "verifiers_envs"))
    yield
    forget_loaded()
    for name in [name for name in sys.modules if name.startswith("vf_")]:
        del sys.modules[name]


def played(env_id: str, *said: str | Message, seed: int = FIRST, **env_args: Any) -> Playthrough:
    messages = [text if isinstance(text, Message) else Message("assistant", text) for text in said]
    return asyncio.run(
        play(
            lambda: make("Verifiers", env_id=env_id, env_args=env_args),
            replaying(messages),
            seed=seed,
            name=env_id,
            max_turns=len(messages),
            step_timeout_seconds=60.0,
        )
    )


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 30), marks=pytest.mark.nightly)], ids=str)
@pytest.mark.parametrize("env_id", ENVIRONMENTS)
def test_check_env_passes(env_id: str, seeds: range, foreign_table: Callable[..., None]) -> None:
    make("Verifiers", env_id=env_id)  # loaded here: importing it may take longer than a step should
    report = check_env("Verifiers", env_config={"env_id": env_id}, seeds=seeds, max_turns=8, num_leak_episodes=0)
    reason = "" if report.passed else str(report.problems[0])
    foreign_table("verifiers", importlib.metadata.version("verifiers"), env_id, report.passed, reason)
    assert report.passed, str(report)


def test_data_are_built_while_the_environment_is_made_and_not_in_a_reset_with_a_deadline() -> None:
    make("Verifiers", env_id="vf-lazy")
    assert sys.modules["vf_lazy"].BUILT == ["eval", "train"]
    assert played("vf-lazy", "11").episode_return == 1.0  # the row of 10
    assert sys.modules["vf_lazy"].BUILT == ["eval", "train"]


def test_data_that_cannot_be_built_fail_the_resets_that_need_them() -> None:
    assert played("vf-lazy", "11", eval_fails=True).episode_return == 1.0
    with pytest.raises(EnvError, match="the hub is down"):
        played("vf-lazy", "1", seed=0, eval_fails=True)


def test_one_turn_is_scored_by_every_function_with_its_weight() -> None:
    run = played("vf-sums", " 7 ", seed=FIRST + 3)  # 3 + 4
    assert run.opening == (Message("system", "Answer with the number."), Message("user", "3+4="))
    [last] = run.answers
    assert (last.reward, dict(last.reward_terms)) == (1.25, {"right": 1.0, "short": 0.25})
    assert (last.terminated, last.truncated, last.info["stop_condition"]) == (True, False, "max_turns_reached")
    assert last.info["metrics"]["num_turns"] == 1.0  # verifiers' own metric


def test_evaluation_seeds_name_evaluation_rows() -> None:
    assert played("vf-sums", "6", seed=3).opening[1].content == "3+3="
    assert played("vf-sums", "6", seed=3).answers[0].reward == 1.25


def test_several_turns_show_only_what_is_new() -> None:
    run = played("vf-guess", "4", "six", "6", "5", seed=4)  # the number 5
    assert [answer.messages for answer in run.answers] == [
        (Message("user", "higher"),),
        (Message("user", "a number"),),
        (Message("user", "lower"),),
        (),  # the limit of four turns ends it before the environment speaks
    ]
    assert [answer.reward for answer in run.answers] == [None, None, None, 0.0]
    run = played("vf-guess", "4", "5", seed=4)
    assert run.answers[-1].messages == (Message("user", "found"),)
    assert dict(run.answers[-1].reward_terms) == {"found": 1.0}
    assert run.answers[-1].info["metrics"]["num_guesses"] == 2.0


def test_python_tools_are_called_and_their_errors_told() -> None:
    calls = (ToolCall("c0", "multiply", {"a": 101, "b": 102}), ToolCall("c1", "divide", {"a": 1, "b": 0}))
    run = played("vf-calculator", Message("assistant", "", calls), "10302")
    assert run.answers[0].messages == (
        Message("tool", "10302", tool_call_id="c0"),
        Message("tool", "division by zero", tool_call_id="c1"),
    )
    assert (run.answers[-1].reward, run.answers[-1].info["metrics"]["multiply_calls"]) == (1.0, 1.0)
    [unmade] = played("vf-calculator", *([Message("assistant", "", calls[:1])] * 4)).answers[-1].messages
    assert unmade.content == "error: the episode is over, this call was not made"  # verifiers ends without an answer
    env = make("Verifiers", env_id="vf-calculator")
    names = [schema["function"]["name"] for schema in env.tool_schemas]
    assert names == ["multiply", "divide"]
    assert set(env.tool_schemas[0]["function"]["parameters"]["properties"]) == {"a", "b"}


def test_a_reward_function_that_raises_is_an_error_where_verifiers_says_zero() -> None:
    text = "reward function raising raised ZeroDivisionError"
    with pytest.raises(EnvError, match=text):
        played("vf-sums", "1", extra="raising")
    with pytest.raises(EnvError, match=text):
        played("vf-several", "1", extra="raising")  # the rubric of an environment within the environment


def test_a_group_reward_is_refused() -> None:
    with pytest.raises(ConfigError, match="score"):
        make("Verifiers", env_id="vf-sums", env_args={"extra": "best_of"})


def test_the_process_keeps_its_signal_handlers() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    make("Verifiers", env_id="vf-guess")
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_hundred_episodes_at_once_keep_to_themselves() -> None:
    async def one(number: int) -> float | None:
        run = await play(
            lambda: make("Verifiers", env_id="vf-guess"),
            replaying([Message("assistant", "0"), Message("assistant", str(number % 8 + 1))]),
            seed=FIRST + number,
            name="vf-guess",
            max_turns=2,
            step_timeout_seconds=60.0,
        )
        return run.episode_return

    async def all_of_them() -> Sequence[float | None]:
        return await asyncio.gather(*map(one, range(100)))

    assert asyncio.run(all_of_them()) == [1.0] * 100


def test_all_episodes_of_a_default_collection_are_kept() -> None:
    """As many at once as there are by default: the environment is made once here, and shared."""

    def one_number(_env: Any, _rng: Any) -> Callable[[Sequence[Message]], str]:
        return lambda _messages: "3"

    seeds = range(FIRST, FIRST + 17)
    collected = collect_episodes("Verifiers", one_number, seeds=seeds, env_config={"env_id": "vf-sums"})
    assert (len(collected.trajectories), collected.dropped) == (17, ())


# -- the other way: our engines in verifiers' loop ------------------------------------------------------------------


def generated(engine: Any, env_id: str, num_rows: int, sampling_args: dict[str, Any]) -> list[dict[str, Any]]:
    import verifiers

    env = verifiers.load_environment(env_id)
    rows = [dict(row) for row in env.get_dataset().select(range(num_rows))]
    results = asyncio.run(
        env.generate(
            rows,
            client=verifiers_client(engine, tiny_tokenizer()),
            model="policy",
            sampling_args=sampling_args,
            state_columns=["trajectory"],
            on_start=lambda *_: None,
            on_progress=lambda *_: None,
        )
    )
    return sorted(results["outputs"], key=lambda output: output["example_id"])


def test_a_scripted_engine_s_ids_arrive_in_verifiers_intact() -> None:
    def reply(prompt: tuple[int, ...], _turn: int) -> list[int]:
        text = bytes(token for token in prompt if token < 256).decode()
        return [*(b"8" if "higher" in text else b"4"), END]

    engine = ScriptedEngine(reply, logprob=-0.125)
    outputs = generated(engine, "vf-guess", 8, {"max_tokens": 8})
    # 4 is found at once; then 8 is tried, and again and again, since nothing else is ever said.
    assert [output["reward"] for output in outputs] == [0, 0, 0, 1, 0, 0, 0, 1]
    assert [output["error"] for output in outputs] == [None] * 8
    seen = {call.prompt_token_ids for call in engine.calls}
    for output in outputs:
        steps = [step["tokens"] for step in output["trajectory"]]
        for tokens in steps:
            assert tuple(tokens["prompt_ids"]) in seen
            assert tokens["completion_ids"][-1] == END
            assert tokens["completion_logprobs"] == [-0.125, -0.125]
        for before, after in pairwise(steps):
            known = [*before["prompt_ids"], *before["completion_ids"]]
            assert after["prompt_ids"][: len(known)] == known


class Noting:
    """A local engine that notes what it sampled for which prompt."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine, self.sampled = engine, {}  # type: ignore[var-annotated]

    async def generate(self, prompt_token_ids: Any, sampling: Any, *, session_id: str | None = None) -> Any:
        completion = await self.engine.generate(prompt_token_ids, sampling, session_id=session_id)
        self.sampled[tuple(prompt_token_ids), sampling.seed] = completion
        return completion


def test_a_model_s_samples_arrive_in_verifiers_intact() -> None:
    engine = Noting(LocalEngine(build_tiny("qwen3-64", 0), max_model_len=1024))
    outputs = generated(engine, "vf-guess", 3, {"max_tokens": 6, "temperature": 1.0, "seed": 3})
    sampled = [(list(prompt), completion) for (prompt, _), completion in engine.sampled.items()]
    steps = [step["tokens"] for output in outputs for step in output["trajectory"]]
    assert len(steps) == len(sampled) == 3 * 4
    for tokens in steps:
        matches = [
            c for p, c in sampled if p == tokens["prompt_ids"] and c.token_ids.tolist() == tokens["completion_ids"]
        ]
        assert len(matches) == 1
        assert tokens["completion_logprobs"] == [float(logprob) for logprob in matches[0].logprobs]
