"""Tests hold on a busy machine: what has to happen has 30 seconds, and a good call has no limit below 1.

Files are read with `ast`. A limit below 1 second stands only where something has to miss it: the table says where, and
why. Where a good call has the same limit as one that misses it, the test moves the clock (`moved_clock.py`).
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHORTEST_BOUND, SHORTEST_LIMIT = 30.0, 1.0  # seconds

LIMIT = re.compile(
    r"timeout|deadline|patience|grace|settle|time_limit|max_(\w+_)?(seconds|time_s)$|(start|stop)_seconds$",
    re.IGNORECASE,
)
CONSTANT_OF_OURS = re.compile(r"_SECONDS$")  # as a test patches it
WAITING_CALLS = ("wait", "wait_for", "join", "timeout")  # with a number in place
LOOKED_AT = (ast.Call, ast.Dict, ast.Assign, ast.AnnAssign, ast.arguments, ast.Constant, ast.BinOp, ast.Assert)
CLOCKS = ("monotonic", "perf_counter", "time")
DURATION = re.compile(r"(^|_)(seconds|elapsed|took|duration)$")
# A quick look at lines of text.
NAMED_SO = re.compile(
    r"(?i:timeout|deadline|patience|grace|settle|time_limit|max_\w*(seconds|time_s)|(start|stop)_seconds)|_SECONDS"
    r"|\b(wait|wait_for|join)\("
)
ASSERTED = re.compile(
    r"\s*assert (?=.*(wait\(|[<>])).*(wait\(|seconds|elapsed|took|duration|monotonic|perf_counter|time\.time)"
)
SHORT_NUMBER = re.compile(r"(?<![\d.\w])0?\.\d*[1-9]|\de-\d|\d / \d")
IN_TEXT = re.compile(r"(\w*(?:timeout|deadline|patience|grace|max_\w*)_(?:seconds|s)) ?= ?(0?\.\d+)")

# What has to miss a limit, and where. What the same function expects of good calls stands under limits of its own.
MUST_MISS = {
    "a call that hangs, or takes seconds": (
        "tests/unit/cluster/test_actors.py::test_what_does_not_come_back_from_rays_own_code_ends_the_program",
        "tests/support/engine_contract_life.py::a_call_out_of_time_raises_and_frees_what_it_held",
        "tests/support/fake_task_app.py::FakeTaskApp",
        "tests/unit/engine/endpoint/test_http_engine.py::test_a_deadline_ends_a_call_that_hangs_and_hangs_up",
        "tests/unit/engine/local/test_engine_life.py::"
        "test_requests_that_were_cancelled_or_ran_out_of_time_are_forgotten_with_their_prompts",
        "tests/unit/engine/test_gate.py::test_a_deadline_counts_the_waiting_too_and_frees_the_place",
        "tests/unit/engine/vllm/test_commands.py::"
        "test_a_caller_that_gives_up_is_cancelled_and_a_time_limit_of_its_own_is_its_own",
        "tests/unit/envs/suites/test_nemo_gym.py::test_a_server_that_hangs_is_a_timeout",
        "tests/unit/envs/suites/test_own_generators.py::test_whoever_waits_for_a_hanging_episode_is_told_after_a_while",
        "tests/unit/envs/suites/test_verifiers_adapter.py::"
        "test_a_limit_on_turns_is_a_rule_of_the_environment_and_a_timeout_is_not",
        "tests/unit/env/test_tool_env.py::Mixed",
        "tests/unit/env/test_tool_env.py::Slow",
        "tests/unit/env/workers/test_env.py::test_a_constructor_that_dies_or_hangs_is_the_episodes_failure",
        "tests/unit/env/workers/test_pool.py::test_a_worker_that_is_killed_in_an_exchange_says_how_it_ended",
        "tests/unit/env/workers/test_threads.py::test_a_stuck_thread_is_not_reused_and_makes_its_last_call",
        "tests/unit/judge/service/test_server.py::test_a_function_that_gives_no_score_leaves_the_episode_unscored",
        "tests/unit/remote/apps/test_client.py::test_the_deadline_holds_until_the_last_byte",
        "tests/unit/remote/gateway/test_app.py::test_errors_are_openais_and_say_whether_to_try_again",
        "tests/unit/remote/serve/test_agent_app.py::test_what_takes_too_long_is_aborted",
        "tests/unit/remote/serve/test_task_app_server.py::"
        "test_an_environment_that_is_as_slow_without_the_actions_aborts_the_rollout",
        "tests/vllm/test_vllm_engine.py::test_aborted_cancelled_and_late_calls_free_what_they_held",
        "tests/vllm/test_vllm_openai.py::test_a_call_that_is_out_of_time_is_given_up_and_the_server_goes_on",
        "tests/vllm/test_vllm_transfer_wire.py::test_a_sender_that_waits_for_ever_keeps_nobody",
    ),
    "a program or a run that hangs": (
        "tests/unit/envs/test_sandbox.py::test_closing_the_output_does_not_outlive_the_clock",
        "tests/unit/envs/test_code_repair_escapes.py::test_the_limits_hold_under_every_confinement",
        "tests/unit/run/test_stopping.py::test_a_run_that_hangs_leaves_when_its_grace_is_over",
    ),
    "a wait that is longer: for a place, for the next attempt, for the rest of a request, for ranks": (
        "tests/cluster/test_learner_ranks.py::test_the_settings_bound_how_long_and_how_often_ranks_are_waited_for",
        "tests/unit/cluster/test_replica.py::MeetingTensors",
        "tests/unit/engine/endpoint/test_http_engine.py::"
        "test_the_settings_deadline_holds_for_waits_between_attempts_too",
        "tests/unit/envs/suites/test_openenv_adapter.py::test_a_server_that_stays_full_is_an_error_that_says_so",
    ),
    "a call that is held: the test looks that it has not ended by then": (
        "tests/support/engine_contract_life.py::a_call_that_is_kept_over_an_update_goes_on_and_its_versions_never_fall",
        "tests/support/engine_contract_life.py::calls_wait_while_the_engine_is_paused",
        "tests/support/engine_contract_life.py::waiting_for_an_update_counts_against_the_deadline",
        "tests/unit/env/workers/test_env.py::test_a_cancelled_call_kills_the_process_too",
        "tests/vllm/test_vllm_parallel.py::test_every_process_sleeps_and_wakes_and_the_environment_is_as_it_was",
    ),
    "what the clock of the test says, which is moved": (
        "tests/support/simulated_run.py::SimulatedRun",
        "tests/unit/env/checks/test_checker.py::test_a_broken_environment_is_caught_by_its_check",
        "tests/unit/env/checks/test_cost.py::test_only_calls_beyond_the_limit_are_problems",
        "tests/unit/env/test_env_session.py::"
        "test_an_environment_that_hangs_in_the_shared_thread_is_named_closed_there_and_delays_no_other",
        "tests/unit/env/workers/test_threads.py::test_a_call_that_waited_for_others_is_not_stuck",
        "tests/unit/env/workers/test_threads.py::test_a_stuck_call_counts_once",
        "tests/unit/env/workers/test_threads.py::test_a_stuck_call_keeps_the_shared_thread_and_the_others_go_on",
        "tests/unit/env/workers/test_threads.py::test_calls_behind_a_stuck_one_that_get_no_thread_fail",
    ),
    "the pause between two looks": (
        "tests/unit/run/test_judged_runs.py::test_a_judge_that_is_away_for_a_while_is_waited_for",
    ),
}


def value_of(node: ast.AST) -> float | None:
    """Return the number that an expression of numbers is, the smaller one of a choice; None: it is none."""
    if isinstance(node, ast.IfExp):
        values = [value for part in (node.body, node.orelse) if (value := value_of(part)) is not None]
        return min(values, default=None)
    if isinstance(node, ast.Constant):
        return float(node.value) if type(node.value) in (int, float) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Mult):
        left, right = value_of(node.left), value_of(node.right)
        if left is None or not right:
            return None
        return left / right if isinstance(node.op, ast.Div) else left * right
    return None


def name_of(node: ast.AST | None) -> str:
    """Return the last name of a variable, an attribute, or a text."""
    if isinstance(node, ast.Subscript):
        node = node.slice
    if isinstance(node, ast.Constant):
        return str(node.value).rpartition(".")[2].rpartition("/")[2]
    return getattr(node, "attr", getattr(node, "id", ""))


def is_clock(node: ast.AST) -> bool:
    """Return whether it reads a clock of the system; `loop.time()` may be simulated."""
    is_call = isinstance(node, ast.Call) and name_of(node.func) in CLOCKS
    return is_call and not (name_of(node.func) == "time" and name_of(getattr(node.func, "value", None)) != "time")


def named_values(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield the names that a node gives to values: arguments, keys, variables, defaults, and what a test patches."""
    if isinstance(node, ast.Call):
        yield from ((keyword.arg or "", keyword.value) for keyword in node.keywords)
        called = name_of(node.func)
        if called in WAITING_CALLS:
            yield from (("timeout", argument) for argument in node.args)
        if called in ("setattr", "setitem") and len(node.args) > 1:
            name = name_of(node.args[-2])
            yield ("timeout" if CONSTANT_OF_OURS.search(name) else name), node.args[-1]
    elif isinstance(node, ast.Dict):
        yield from ((name_of(key), value) for key, value in zip(node.keys, node.values, strict=True))
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            names, values = getattr(target, "elts", [target]), getattr(node.value, "elts", [node.value])
            yield from ((name_of(name), value) for name, value in zip(names, values, strict=False))
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        yield name_of(node.target), node.value
    elif isinstance(node, ast.arguments):
        given = [*node.posonlyargs, *node.args]
        yield from ((one.arg, value) for one, value in zip(reversed(given), reversed(node.defaults), strict=False))
        yield from ((one.arg, value) for one, value in zip(node.kwonlyargs, node.kw_defaults, strict=True) if value)


def short_limits(node: ast.AST) -> Iterator[str]:
    """Yield the limits below a second that a node sets, also in a text."""
    for name, value in named_values(node):
        seconds = value_of(value)
        is_short = seconds is not None and 0 < seconds < SHORTEST_LIMIT
        if is_short and LIMIT.search(name) and not name.lower().endswith("_prob"):
            yield f"{name} = {seconds:g}"
    if isinstance(node, ast.Constant) and isinstance(node.value, str):  # a configuration, a program
        yield from (f"{name} = {number}" for name, number in IN_TEXT.findall(node.value) if float(number))


def short_bounds(node: ast.AST) -> Iterator[str]:
    """Yield the durations that an assertion wants to be below a number under 30, and deadlines that are as near."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and is_clock(node.left):
        seconds = value_of(node.right)
        if seconds is not None and 0 < seconds < SHORTEST_BOUND:
            yield ast.unparse(node)
    if not isinstance(node, ast.Assert):
        return
    for part in ast.walk(node.test):
        if isinstance(part, ast.Call) and name_of(part.func) == "wait":
            given = [value_of(argument) for argument in (*part.args, *(k.value for k in part.keywords))]
            yield from (ast.unparse(part) for seconds in given if seconds is not None and seconds < SHORTEST_BOUND)
        if not isinstance(part, ast.Compare):
            continue
        operands = [part.left, *part.comparators]
        for left, sign, right in zip(operands, part.ops, operands[1:], strict=False):
            less, more = (left, right) if isinstance(sign, ast.Lt | ast.LtE) else (right, left)
            bound = value_of(more)
            is_bound = isinstance(sign, ast.Lt | ast.LtE | ast.Gt | ast.GtE) and bound is not None
            if is_bound and bound < SHORTEST_BOUND and is_duration(less):
                yield ast.unparse(part)


def is_duration(node: ast.AST) -> bool:
    """Return whether it is a difference of a clock's times, or has the name of a duration."""
    is_difference = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub)
    return bool(DURATION.search(name_of(node))) or (is_difference and any(map(is_clock, ast.walk(node))))


@dataclass(frozen=True)
class Site:
    """A short limit, or a short bound of an assertion, and where it stands: file::function, of the file's top."""

    place: str
    line: int
    text: str
    is_bound: bool


def sites(file: str, text: str) -> Iterator[Site]:
    """Yield what is short in a file's text."""
    for top in ast.parse(text).body:
        place = f"{file}::{getattr(top, 'name', '')}"
        for node in (node for node in ast.walk(top) if isinstance(node, LOOKED_AT)):
            line = getattr(node, "lineno", top.lineno)
            yield from (Site(place, line, limit, is_bound=False) for limit in short_limits(node))
            yield from (Site(place, line, bound, is_bound=True) for bound in short_bounds(node))


def may_have_sites(text: str) -> bool:
    """Return whether a look at the lines finds what could be one; reading all files as Python takes seconds."""
    return any(
        (SHORT_NUMBER.search(line) and NAMED_SO.search(line))
        or ASSERTED.match(line)
        or ("() + " in line and any(f"{clock}() + " in line for clock in CLOCKS))
        for line in text.splitlines()
    )


@pytest.fixture(scope="module")
def found() -> list[Site]:
    texts = {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path != Path(__file__)
    }
    return [site for file, text in texts.items() if may_have_sites(text) for site in sites(file, text)]


def test_no_assertion_wants_anything_within_less_than_30_seconds(found: list[Site]) -> None:
    assert [site for site in found if site.is_bound] == []


def test_limits_below_a_second_stand_only_where_something_has_to_miss_them(found: list[Site]) -> None:
    limits = [site for site in found if not site.is_bound]
    listed = [place for places in MUST_MISS.values() for place in places]
    assert [site for site in limits if site.place not in listed] == []
    assert sorted({site.place for site in limits}) == sorted(listed)  # or one is gone: take it off the list


# --- the rules can fail -----------------------------------------------------------------------------------------------


def short(code: str) -> list[str]:
    """What is found in a function of these lines, and that no file with it is passed over."""
    text = "def test():\n" + textwrap.indent(textwrap.dedent(code), "    ")
    assert may_have_sites(text)
    return [site.text for site in sites("test_x.py", text)]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("play(step_timeout_seconds=0.4)", "step_timeout_seconds = 0.4"),
        ("play(step_timeout_seconds=1e-3)", "step_timeout_seconds = 0.001"),
        ("play(step_timeout_seconds=9.0 if good else 1 / 4)", "step_timeout_seconds = 0.25"),
        ("play(**{'limits.step_timeout_seconds': 0.4})", "step_timeout_seconds = 0.4"),
        ("load('limits.step_timeout_seconds=0.4')", "step_timeout_seconds = 0.4"),
        ("def play(patience: float = 0.4): ...", "patience = 0.4"),
        ("def play(*, max_seconds: float = 0.4): ...", "max_seconds = 0.4"),
        ("nodes.settle_seconds, began = 0.5, now()", "settle_seconds = 0.5"),
        ("deadline: float = 0.5", "deadline = 0.5"),
        ("patch.setattr(serving, '_HEAD_SECONDS', 0.3)", "timeout = 0.3"),
        ("patch.setattr('gspo_gym.run.steering._JOIN_SECONDS', 0.3)", "timeout = 0.3"),
        ("ended.wait(0.1)", "timeout = 0.1"),
        ("thread.join(timeout=0.1)", "timeout = 0.1"),
        ("async with asyncio.timeout(0.1): ...", "timeout = 0.1"),
        ("assert time.monotonic() - began < 5", "time.monotonic() - began < 5"),
        ("assert 9 >= perf_counter() - began", "9 >= perf_counter() - began"),
        ("assert 0.3 <= result.seconds < 5, result", "0.3 <= result.seconds < 5"),
        ("assert is_over and row['time/step_seconds'] < 29.9", "row['time/step_seconds'] < 29.9"),
        ("assert ended.wait(5)", "ended.wait(5)"),
        ("assert process.wait(timeout=5) == 0", "process.wait(timeout=5)"),
        ("deadline = time.monotonic() + 10", "time.monotonic() + 10"),
    ],
)
def test_what_is_short_is_found(code: str, text: str) -> None:
    assert short(code) == [text]


def test_what_is_long_or_no_limit_is_not_found() -> None:
    assert (
        short("""
        play(step_timeout_seconds=1.0, timeout_prob=0.5, max_wait_seconds=0.0, poll_seconds=0.01)
        deadline = time.monotonic() + 30
        assert ended.wait(30)
        assert result.seconds >= 0.3
        assert time.monotonic() - began < 30
        assert loop.time() - began < 3
        assert 0.1 < reward < 0.2
    """)
        == []
    )
