"""For all tests: no network, one thread, a budget of processor time, and an episode that fills every field."""

from __future__ import annotations

import os
import signal
from pathlib import Path

# A shell's background job ignores Ctrl-C, and so does every process that it starts: those of tests are to take it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before anything imports torch or transformers: sums do not depend on the machine's cores, and a misspelt model name
# fails at once instead of after a download's retries.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
from _pytest.doctest import DoctestModule
from processor_time import ProcessorTime

from gspo_gym.types import (
    FinishReason,
    Message,
    Outcome,
    ParseStatus,
    Segment,
    Task,
    Timing,
    ToolCall,
    Trajectory,
    Turn,
)

STANDARD_HANDLERS = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}

# What may take more processor seconds than the budget of a quick test, and how many. Keep it short: mark tests `slow`.
ALLOWED_SECONDS = {
    "tests/unit/diagnosis/test_token_findings.py": 12.0,  # runs to plant bugs in
    "tests/unit/run/test_run.py": 12.0,  # each its own runs
    "tests/unit/run/test_tokens.py": 20.0,  # a run to read
    "tests/unit/env/test_watchdog.py": 10.0,  # programs that compute until they are ended
    "tests/unit/test_examples.py": 10.0,
    "tests/unit/test_floors.py": 10.0,  # all modules are parsed once
    "tests/unit/env/workers/test_env.py": 10.0,  # servers of workers
    "tests/unit/cli/test_main.py::test_bash_takes_the_completion_script": 8.0,  # all commands' arguments are read
    "tests/unit/cli/test_commands.py::test_the_commands_that_compute_import_so": 12.0,  # how a real command starts
    "tests/fault/test_http_engine_faults.py::test_300_requests_of_which_a_fifth_fails_give_300_samples": 8.0,
    "tests/invariance/test_pipeline_equals_synchronous.py::test_a_bound_of_0_is_the_synchronous_run_bit_for_bit": 8.0,
    "tests/unit/chat/test_parsing.py::test_any_text_is_a_message_or_a_failure_that_keeps_the_text": 8.0,
    "tests/unit/engine/local/test_engine.py::test_sixty_four_episodes_at_once_sample_what_one_at_a_time_does": 12.0,
    "tests/unit/envs/suites/test_toy_text_adapter.py::test_it_keeps_the_contract": 8.0,
    "tests/fault/test_gateway_retries.py::test_many_rollouts_whose_clients_time_out_commit_one_turn_for_each_call": 6.0,
    "tests/fault/test_gateway_faults.py::test_an_answer_that_was_lost_on_the_way_is_given_again": 6.0,
    "tests/fault/test_request_fuzz.py::test_every_server_of_the_project_is_in_the_list_of_those_that_are_flooded": 6.0,
}


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ProcessorTime(ALLOWED_SECONDS))


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, Any, list[pytest.Collector]]:
    """Look for doctests in the packages alone: in tests it would import every file twice to find none."""
    return [collector for collector in (yield) if not isinstance(collector, DoctestModule)]


@pytest.fixture(autouse=True)
def standard_handlers_of_signals() -> None:
    """Give a test the handlers of a fresh program: packages leave theirs (verifiers' environments do), which stay."""
    for number, handler in STANDARD_HANDLERS.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture
def rich_trajectory() -> Trajectory:
    """Two segments, three turns, tools, reasoning, text beyond ASCII, and logprobs that no decimal writes exactly."""
    logprobs = np.array([0, 0, -0.1, -1 / 3, 0, -1e-7], dtype=np.float32)
    first = Segment(
        token_ids=np.array([5, 6, 7, 2**31 - 1, 9, 10]),
        action_mask=np.array([False, False, True, True, False, True]),
        rollout_logprobs=logprobs,
        turn_index=np.array([-1, -1, 0, 0, -1, 1]),
        weight_version=np.array([-1, -1, 3, 4, -1, 4]),
    )
    second = Segment(
        token_ids=np.array([1, 2]),
        action_mask=np.array([False, True]),
        rollout_logprobs=np.array([0, -np.float32(np.finfo(np.float32).max)]),
        turn_index=np.array([-1, 2]),
        weight_version=np.array([-1, 4]),
    )
    call = ToolCall("call_0", "query", {"sql": "select 'é'", "limit": 3, "nested": {"x": [1.5, None, True]}})
    return Trajectory(
        trajectory_id="step_000001/group_0000/0",
        attempt=1,
        task=Task("gspo_gym/SqlAnalyst-v0", 2**31 + 5, {"level": 2}),
        sampling_seed=2**63 - 1,
        segments=(first, second),
        turns=(
            Turn(0, 0, (0, 2), (2, 4), FinishReason.STOP, reward=0.1, reward_terms={"found": 0.1}, events=("a", "b")),
            Turn(1, 0, (4, 5), (5, 6), FinishReason.LENGTH, ParseStatus.BAD_TOOL_CALL),
            Turn(2, 1, (0, 1), (1, 2), FinishReason.STOP, reward=1 / 3),
        ),
        messages=(
            Message("system", "You answer.\u2028"),
            Message("user", "Wie viele? 数 \ud83d"),
            Message("assistant", "", tool_calls=(call,), reasoning_content="hm"),
            Message("tool", "3", tool_call_id="call_0", name="query"),
        ),
        outcome=Outcome.TRUNCATED,
        success=False,
        error=None,
        timing=Timing(1.5, 0.25, 1 / 3),
    )
