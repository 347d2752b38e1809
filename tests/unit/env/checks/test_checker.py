"""check_env: a good environment passes, and each way of breaking it is caught by the check that is there for it.

The list of mutations is `BROKEN`: an environment, the check that must report it, and a part of what it must say. What
costs time and what is left behind is in test_check_cost.py, tricks in test_check_tricks.py, worker processes in
test_check_isolation.py.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from moved_clock import move_clock

from gspo_gym.env.checks.checker import CHECKS, CheckReport, check_env
from gspo_gym.env.core import TextEnv, ToolEnv
from gspo_gym.env.rewards import Reward
from gspo_gym.env.tools import ToolError, tool
from gspo_gym.errors import ConfigError, ContractError, UnknownNameError
from gspo_gym.types import Message, ToolCall

SEEDS = range(4)


def tell_sum(env: Any, rng: np.random.Generator) -> Callable[[Sequence[Message]], str]:
    return lambda messages: str(env.numbers[-1] + env.numbers[-2])


def guess(env: Any, rng: np.random.Generator) -> Callable[[Sequence[Message]], str]:
    return lambda messages: str(rng.integers(20))


class Sums(TextEnv):
    """Two sums to be told, 0.5 each. Keeps the contract; the mutations below break it."""

    policies: ClassVar = {"reference": tell_sum, "random": guess}
    reward_range = (0.0, 1.0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.num_right = self.num_told = 0
        self.numbers: list[int] = []
        self.is_over = False
        return self.question(), {}

    def question(self) -> str:
        self.numbers += [int(n) for n in self.np_random.integers(10, size=2)]
        return f"{self.numbers[-2]} + {self.numbers[-1]} = ?"

    def step(self, action: str) -> Any:
        if self.is_over:
            raise RuntimeError("the episode is over")
        is_right = action.strip() == str(self.numbers[-1] + self.numbers[-2])
        self.num_right += is_right
        self.num_told += 1
        self.is_over = self.num_told == 2
        success = self.num_right == 2 if self.is_over else None
        observation = "Thanks." if self.is_over else self.question()
        return observation, Reward({"right": 0.5 * is_right}, success=success), self.is_over, False, {}


class AsyncSums(Sums):
    async def reset(self, **given: Any) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().reset(**given)

    async def step(self, action: str) -> Any:
        await asyncio.sleep(0)
        return super().step(action)


def press_lit(env: Any, rng: np.random.Generator) -> Callable[[Sequence[Message]], Message]:
    def play(messages: Sequence[Message]) -> Message:
        return Message("assistant", "", tool_calls=(ToolCall(f"c{len(messages)}", "press", {"button": env.lit}),))

    return play


class Buttons(ToolEnv):
    policies: ClassVar = {"reference": press_lit}
    reward_range = (0.0, 1.0)

    def start(self, options: Any) -> str:
        self.lit = int(self.np_random.integers(100))
        return "Press the lit button."

    @tool
    def press(self, button: int) -> str:
        """Press a button."""
        self.finish(Reward({"lit": float(button == self.lit)}, success=button == self.lit))
        return "click"

    def end_turn(self) -> None:
        if self.num_turns == 3:
            self.finish(Reward({}, success=False), truncated=True)


class BrokenTool(Buttons):
    """The reference knocks first, on a door that is not there; it ignores the answer and wins."""

    policies: ClassVar = {"reference": lambda env, rng: knock_then_press(env)}

    @tool
    def knock(self, times: int) -> str:
        """Knock."""
        return {}[times]  # type: ignore[no-any-return, index]


class RaisingTool(Buttons):
    """No hand-written player calls the tool that always raises; arguments that fit its schema find it."""

    @tool
    def knock(self, times: int) -> str:
        """Knock."""
        raise OSError("no door")


class PickyTool(Buttons):
    """No arbitrary argument is right, which the tool says: that may be so."""

    @tool
    def knock(self, password: str) -> str:
        """Knock."""
        raise ToolError(f"{password} is wrong")


def knock_then_press(env: Any) -> Any:
    def play(messages: Sequence[Message]) -> Message:
        knock = ToolCall("c0", "knock", {"times": 1})
        return Message("assistant", "", (knock, ToolCall("c1", "press", {"button": env.lit})))

    return play


class AsyncButtons(Buttons):
    @tool
    async def look(self) -> str:
        """Look."""
        await asyncio.sleep(0)
        return "lights"


class PlainCoin:
    """No subclass of anything, no policies, no close."""

    def reset(self, seed: int) -> Any:
        self.side = "heads" if seed % 2 else "tails"
        return "Which side?", {}

    def step(self, action: str) -> Any:
        return self.side, float(action == self.side), True, False, {}


def check(env: Any, **settings: Any) -> CheckReport:
    return check_env(env, **{"seeds": SEEDS, "step_timeout_seconds": 5.0, "num_leak_episodes": 4, **settings})


@pytest.mark.parametrize("good", [Sums, AsyncSums, Buttons, AsyncButtons, PlainCoin])
def test_a_good_environment_passes_every_check(good: type) -> None:
    report = check(good)
    assert report.passed, str(report)
    assert report.checks == tuple(CHECKS)
    assert "4 seeds gave at least" in report.facts[0].text


def test_notes_say_what_could_not_be_checked() -> None:
    assert check(PlainCoin).notes == (
        "no policy 'reference': whether the task can be solved was not checked",
        "neither success nor a largest return: whether the answer is shown was not checked",
        "not a gymnasium.Env with plain methods, so Gymnasium's own checker does not apply",
    )


def test_a_tool_that_refuses_what_nobody_could_guess_is_told_of() -> None:
    report = check(PickyTool)
    assert report.passed, str(report)
    facts = [fact.text for fact in report.facts]
    assert "called by no hand-written player, and not seen to work: knock" in facts


# -- the mutations ---------------------------------------------------------------------------------------------------


def answering(position: int, value: Any) -> type[Sums]:
    """Sums whose step answers `value` in place of one of its five parts."""

    class Wrong(Sums):
        def step(self, action: str) -> Any:
            answer = list(super().step(action))
            answer[position] = value
            return tuple(answer)

    return Wrong


def playing(**policies: Any) -> type[Sums]:
    class Wrong(Sums):
        pass

    Wrong.policies = {**Sums.policies, **policies}
    return Wrong


def answering_isolation(isolation: Any) -> type[Sums]:
    class Wrong(Sums):
        pass

    Wrong.isolation = isolation
    return Wrong


class OneForAll:
    instance = Sums()

    def __new__(cls) -> Any:
        return cls.instance


class BackwardRange(Sums):
    reward_range = (1.0, 0.0)


class PoliciesList(Sums):
    policies: ClassVar = ["reference"]  # type: ignore[assignment]


class NoStep:
    def reset(self, seed: int) -> Any:
        return "go", {}


class RaisesInInit(Sums):
    def __init__(self) -> None:
        raise OSError("no data")


class ResetWithoutInfo(Sums):
    def reset(self, **given: Any) -> Any:
        return super().reset(**given)[0]


class StepOfFour(Sums):
    def step(self, action: str) -> Any:
        return super().step(action)[:4]


class RaisesForSomeSeeds(Sums):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed == 2:
            raise IndexError("no such task")
        return super().reset(seed=seed)


class Hangs(Sums):
    async def step(self, action: str) -> Any:
        move_clock(asyncio.get_running_loop(), 60.0)
        await asyncio.Event().wait()


class GlobalNumpy(Sums):
    isolation = "thread"

    def question(self) -> str:
        np.random.seed(self.num_told)
        return super().question()


class GlobalRandom(Sums):
    isolation = "thread"

    def step(self, action: str) -> Any:
        random.random()
        return super().step(action)


class Clock:
    """Time that passes where an environment says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


class SlowSums(Sums):
    def step(self, action: str) -> Any:
        CLOCK.now += 1.0
        return super().step(action)


class KeepsEveryEpisode(Sums):
    kept: ClassVar[list[bytes]] = []

    def close(self) -> None:
        self.kept.append(bytes(5_000))


class SharedState(Sums):
    """Right while it plays alone: the numbers are the class's. They are never emptied, so it answers, but wrongly."""

    numbers: list[int] = [0, 0]

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "numbers":
            super().__setattr__(name, value)
        elif value:
            SharedState.numbers = value

    async def step(self, action: str) -> Any:
        await asyncio.sleep(0.01)  # others move meanwhile
        return super().step(action)


class IgnoresSeed(Sums):
    counter = itertools.count()

    def question(self) -> str:
        self.numbers += [next(self.counter), 0]
        return f"{self.numbers[-2]} + 0 = ?"


class KeepsState(Sums):
    """The second episode of an instance is another one than that of a fresh instance."""

    num_episodes = 0

    def reset(self, **given: Any) -> Any:
        observation, info = super().reset(**given)
        self.num_episodes += 1
        return f"Episode {self.num_episodes}. {observation}", info


class AnswersForTheModel(Sums):
    def question(self) -> str:
        return [Message("user", super().question()), Message("assistant", "Hm.")]  # type: ignore[return-value]


class AnswersNoCall(Buttons):
    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        return ("clicked" if isinstance(observation, list) else observation), *rest


class AnswersForeignCall(Buttons):
    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        if isinstance(observation, list):
            observation = [Message("tool", "clicked", tool_call_id="another")]
        return observation, *rest


class PaysTooMuch(Sums):
    reward_range = (0.0, 0.75)


class IgnoresTimeLimit(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Declares a time limit, and forgets it."""

    def __init__(self) -> None:
        super().__init__(Endless())

    @property
    def spec(self) -> Any:
        return gymnasium.envs.registration.EnvSpec("Endless-v0", max_episode_steps=3)


class Endless(TextEnv):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return "Say something.", {}

    def step(self, action: str) -> Any:
        return "Go on.", 0.0, False, False, {}


class NotAnew(Sums):
    """After the end, reset shows the last word."""

    is_over = False

    def reset(self, **given: Any) -> Any:
        was_over = self.is_over
        observation, info = super().reset(**given)
        return ("Thanks." if was_over else observation), info


class NoSenseOfErrors(Sums):
    def invalid_action(self, error: str) -> Any:
        return error


class ClosesOnce(Sums):
    is_closed = False

    def close(self) -> None:
        if self.is_closed:
            raise ValueError("closed already")
        self.is_closed = True


class ClosesOnlyAfterReset(Sums):
    def close(self) -> None:
        del self.numbers


class PaysForNothing(Sums):
    def step(self, action: str) -> Any:
        observation, reward, *rest = super().step(action)
        return observation, Reward({"right": 0.5}, success=reward.success), *rest


class EchoWins(TextEnv):
    reward_range = (0.0, 2.0)
    policies: ClassVar = {"reference": lambda env, rng: lambda messages: "open sesame"}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return "Repeat this.", {}

    def step(self, action: str) -> Any:
        reward = Reward({"said": 2.0 * (action == "open sesame")}, success=action != "")
        return "Done.", reward, True, False, {}


class TellsTheNumber(TextEnv):
    """The answer is in info, which every server of the environment passes on."""

    reward_range = (0.0, 1.0)
    policies: ClassVar = {"reference": lambda env, rng: lambda messages: str(env.number)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(1_000, 10_000))
        return "Which number?", {"expected": self.number}

    def step(self, action: str) -> Any:
        is_right = action == str(self.number)
        return "", Reward({"right": float(is_right)}, success=is_right), True, False, {}


class UnseededGymnasium(Sums):
    """Does not tell Gymnasium of the seed."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._np_random = np.random.default_rng(0 if seed is None else [seed, 7])
        answer = super().reset()
        self._np_random = None
        return answer

    def question(self) -> str:
        self._np_random = self._np_random or np.random.default_rng(0)
        return super().question()


BROKEN: list[tuple[Any, str, str]] = [
    (OneForAll, "construction", "expected a fresh instance from every call, got the same object twice"),
    (BackwardRange, "construction", "expected reward_range to be (smallest, largest return), got (1.0, 0.0)"),
    (PoliciesList, "construction", "expected policies to map names to functions"),
    (NoStep, "construction", "expected an object with reset and step"),
    (RaisesInInit, "construction", "making the environment raised OSError: no data"),
    (ResetWithoutInfo, "play", "reset(): expected (observation, info), got str"),
    (StepOfFour, "play", "got tuple of length 4"),
    (answering(0, 3), "play", "expected text or a sequence of messages, got int 3"),
    (answering(1, math.nan), "play", "expected a finite reward, got float nan"),
    (answering(1, "0.5"), "play", "expected a number or None as the reward, got str '0.5'"),
    (answering(2, 0), "play", "expected terminated as a bool, got int 0"),
    (answering(3, None), "play", "expected truncated as a bool, got NoneType"),
    (answering(4, None), "play", "expected info as a mapping, got NoneType"),
    (RaisesForSomeSeeds, "play", "random, seed 2: EnvError: RaisesForSomeSeeds: reset() raised IndexError"),
    (Hangs, "play", "EnvTimeoutError: Hangs: step() did not answer within"),
    (playing(random=lambda env, rng: lambda messages: 1 / 0), "play", "the player raised ZeroDivisionError"),
    (playing(random=lambda env, rng: env.nothing), "play", "PlayerError: making the player raised AttributeError"),
    (GlobalNumpy, "isolation", "random, seed 0: reset() changed the generator of numpy.random, which all"),
    (GlobalRandom, "isolation", "step(), turn 0, changed the generator of random, which all episodes"),
    (answering_isolation("fibre"), "construction", "expected isolation to be 'thread', 'process' or None, got 'fibre'"),
    (SharedState, "determinism", "alone and beside others differ: turn 0: expected"),
    (IgnoresSeed, "determinism", "alone and beside others differ: reset: expected the observation"),
    (KeepsState, "reset", "a fresh instance and one that was reset differ: reset: expected the observation"),
    (AnswersForTheModel, "messages", "expected reset to end with something to answer, got an assistant message last"),
    (AnswersForTheModel, "messages", "expected no assistant message from the environment"),
    (AnswersNoCall, "messages", "turn 0: expected tool messages for the calls ['c1'], got []"),
    (AnswersForeignCall, "messages", "turn 0: expected tool messages for the calls ['c1'], got ['another']"),
    (PaysTooMuch, "reward range", "reference, seed 0: expected a return in reward_range (0.0, 0.75), got 1.0"),
    (answering(1, -0.25), "reward range", "expected a return in reward_range (0.0, 1.0), got -0.5"),
    (IgnoresTimeLimit, "end", "expected the end within 3 steps, the time limit, it went on"),
    (NotAnew, "end", "seed 0: expected reset after the end to begin anew"),
    (NoSenseOfErrors, "invalid action", "invalid_action(): expected (observation, reward,"),
    (ClosesOnce, "close", "close() raised ValueError: closed already"),
    (ClosesOnlyAfterReset, "close", "close() raised AttributeError"),
    (playing(reference=guess), "reference", "expected 'reference' to succeed, it failed"),
    (answering(1, 0.25), "reference", "seed 0: expected 'reference' to earn 1.0, got 0.5"),
    (SlowSums, "time", "step(), turn 0: expected an answer within 0.5 seconds, it took 1"),
    (KeepsEveryEpisode, "leaks", "expected an episode to leave nothing behind after close, got"),
    (playing(random=tell_sum), "tricks", "expected random to earn less than 'reference' on average (1), got 1"),
    (PaysForNothing, "tricks", "expected an empty answer to earn less than 'reference' on average (1), got 1"),
    (EchoWins, "tricks", "seed 0: expected repeating the prompt to fail, it succeeded; where a guess can win"),
    (BrokenTool, "messages", "tool knock: expected an answer to hand-written players, got in all"),
    (RaisingTool, "messages", "tool knock: expected an answer to arguments that fit its schema, got in all"),
    (TellsTheNumber, "copying", "expected info['expected'] to say nothing of the answer"),
    (UnseededGymnasium, "gymnasium", "AssertionError"),
]


@pytest.mark.parametrize(("broken", "name", "text"), BROKEN, ids=lambda value: getattr(value, "__name__", None))
def test_a_broken_environment_is_caught_by_its_check(broken: Any, name: str, text: str) -> None:
    report = check(
        broken,
        step_timeout_seconds=60.0,
        max_turns=20,
        max_step_seconds=0.5,
        num_leak_episodes=4 if name == "leaks" else 0,
        clock=CLOCK,
    )
    assert not report.passed
    found = [problem.text for problem in report.problems if problem.check == name]
    assert any(text in each for each in found), f"{name} did not say {text!r}:\n{report}"


def test_every_check_has_a_mutation() -> None:
    assert {name for _, name, _ in BROKEN} == set(CHECKS)
    assert list(CHECKS)[:2] == ["construction", "play"]  # without which there is nothing to judge


def test_an_endless_environment_is_noted() -> None:
    report = check(Endless, max_turns=5)
    assert report.passed, str(report)
    note = "5 turns of arbitrary actions were not the end"
    assert any(each.startswith(note) for each in report.notes)


def test_going_on_after_the_end_is_noted() -> None:
    class GoesOn(PlainCoin):
        num_steps = 0

        def step(self, action: str) -> Any:
            self.num_steps += 1
            return "x", 0.0, self.num_steps == 1, False, {}

        def reset(self, seed: int) -> Any:
            self.num_steps = 0
            return super().reset(seed)

    assert any("step() after the end goes on" in note for note in check(GoesOn).notes)


def test_a_fourth_problem_of_a_check_is_only_counted() -> None:
    problems = [problem.text for problem in check(ResetWithoutInfo).problems if problem.check == "play"]
    # 3 players (random, reference, arbitrary) on 4 seeds.
    assert len(problems) == 4
    assert problems[-1] == "... and 9 more like these"


def test_what_could_not_be_judged_is_shown_as_such() -> None:
    report = check(ResetWithoutInfo)
    assert report.checks == ("construction", "play")
    lines = str(report).splitlines()
    assert lines[0] == "ResetWithoutInfo: FAILED"
    assert lines[1].startswith("  ok   construction: ")
    assert lines[2].startswith("  FAIL play: ")
    assert sum(line.startswith("  -    ") for line in lines) == len(CHECKS) - 2


def test_the_report_raises_all_that_was_found() -> None:
    check(Sums).raise_if_failed()
    with pytest.raises(ContractError) as caught:
        check(PaysTooMuch).raise_if_failed()
    assert "reward range" in str(caught.value)
    assert "expected 'reference' to earn 0.75, got 1.0" in str(caught.value)


def test_other_names_for_the_policies_can_be_given() -> None:
    report = check(playing(reference=guess, best=tell_sum, worst=tell_sum), reference="best", random="worst")
    assert [problem.check for problem in report.problems] == ["tricks"]


def test_it_works_inside_a_running_event_loop() -> None:
    async def notebook() -> CheckReport:
        return check(Sums)

    assert asyncio.run(notebook()).passed


def test_a_registered_name_is_enough_and_a_wrong_one_gets_the_nearest() -> None:
    assert check("GuessNumber").name == "gspo_gym/GuessNumber-v0"
    with pytest.raises(UnknownNameError, match="did you mean 'GuessNumber'"):
        check("GuesNumber")


def test_the_report_for_machines_says_what_the_text_says() -> None:
    report = check(PaysTooMuch)
    written = json.loads(json.dumps(report.as_json()))
    assert (written["environment"], written["passed"]) == ("PaysTooMuch", False)
    assert list(written["checks"]) == list(CHECKS)
    assert written["checks"]["play"]["state"] == "ok"
    assert written["checks"]["reward range"]["state"] == "FAIL"
    assert "expected a return in reward_range (0.0, 0.75), got 1.0" in written["checks"]["reward range"]["problems"][0]
    assert written["notes"] == list(report.notes)
    assert written["measurements"]["mean_returns"]["reference"] == 1.0
    # 3 players on 4 seeds with two sums each
    assert written["measurements"]["reset_seconds"]["num_calls"] == 12
    assert written["measurements"]["step_seconds"]["num_calls"] == 24


def test_a_healthy_report_fits_one_screen() -> None:
    lines = str(check("SqlAnalyst")).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 120


def test_a_reference_that_need_not_be_perfect_only_has_to_beat_the_others() -> None:
    class Lucky(Sums):
        """Two dice: what the best play earns depends on luck."""

        reference_is_perfect = False

        def step(self, action: str) -> Any:
            observation, reward, *rest = super().step(action)
            return observation, Reward({"right": float(reward) / 2}), *rest

    assert check(Lucky).passed
    Lucky.reference_is_perfect = True
    assert "expected 'reference' to earn 1.0, got 0.5" in str(check(Lucky))


def test_one_seed_is_too_few() -> None:
    with pytest.raises(ConfigError, match="expected at least 2 seeds"):
        check_env(Sums, seeds=[1])


def test_too_few_episodes_to_find_a_leak_in_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected num_leak_episodes = 0 or at least 4, got 3"):
        check_env(Sums, num_leak_episodes=3)
