"""EnvSession: every kind of environment driven alike, and every failure with its own error.

Pinned here:

1.  Text environments get the text, tool environments the message; observations become messages.
2.  Plain, async, mixed and wrapped environments, and plain objects, are all driven.
3.  Plain methods run in one thread per session, off the loop; async ones in the loop.
4.  What is raised, what comes late and what has the wrong shape are three errors, which name environment and method.
5.  A call that was given up leaves nothing but close, and a plain close never runs beside it.
6.  close happens once, whatever happened before.
7.  Environments that may run in any thread share one while they are quick; one that hangs there fails as in its own.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
from collections.abc import Callable, Coroutine, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from moved_clock import Hang, move_clock

from gspo_gym.env.core import TextEnv, ToolEnv
from gspo_gym.env.rewards import Reward
from gspo_gym.env.session import EnvSession, looking_at, open_session
from gspo_gym.env.tools import tool
from gspo_gym.env.workers.threads import OwnThread, QuickCalls
from gspo_gym.env.workers.wire import refusal_in
from gspo_gym.errors import ContractError, EnvError, EnvTimeoutError, UsageError
from gspo_gym.types import Message, ToolCall


def say(text: str) -> Message:
    return Message("assistant", text)


def run(play: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(play())


async def begun() -> None:
    """Let the tasks of this loop begin; none of them waits for anything real."""
    for _ in range(10):
        await asyncio.sleep(0)


class Echo(TextEnv):
    """Repeats what it hears until it hears "stop"; `trouble` may interfere with a method."""

    def __init__(self, trouble: Callable[[str], Any] = lambda method: None) -> None:
        self.trouble = trouble
        self.num_closed = 0
        self.threads: set[int] = set()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.threads.add(threading.get_ident())
        return self.trouble("reset") or (f"{seed} {options}", {"seed": seed})

    def step(self, action: str) -> Any:
        self.threads.add(threading.get_ident())
        return self.trouble("step") or (action, 0.25, action == "stop", False, {})

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.num_closed += 1
        self.trouble("close")


class AsyncEcho(Echo):
    """The same, async."""

    async def reset(self, **given: Any) -> Any:  # type: ignore[override]
        return super().reset(**given)

    async def step(self, action: str) -> Any:
        return super().step(action)

    async def close(self) -> None:  # type: ignore[override]
        super().close()


class LaterEcho(Echo):
    """Plain methods that return awaitables."""

    def step(self, action: str) -> Any:
        async def later() -> Any:
            await asyncio.sleep(0)
            return Echo.step(self, action)

        return later()


async def episode(env: Any, **settings: Any) -> list[Any]:
    session = EnvSession(env, env_id="Echo-v0", **settings)
    try:
        return [await session.reset(5), await session.step(say("hi")), await session.step(say("stop"))]
    finally:
        await session.close()


@pytest.mark.parametrize("kind", [Echo, AsyncEcho, LaterEcho])
def test_plain_and_async_environments_are_driven_alike(kind: type[Echo]) -> None:
    env = kind()
    opening, first, last = asyncio.run(episode(env))
    assert (opening.messages, opening.reward, opening.info) == ((Message("user", "5 None"),), None, {"seed": 5})
    assert (first.messages, first.reward, first.done) == ((Message("user", "hi"),), 0.25, False)
    assert (last.terminated, last.truncated) == (True, False)
    assert env.num_closed == 1


def test_plain_methods_have_one_thread_and_it_is_not_the_loops() -> None:
    env = Echo()
    asyncio.run(episode(env))
    assert len(env.threads) == 1
    assert threading.get_ident() not in env.threads


def test_async_methods_run_in_the_loops_thread() -> None:
    env = AsyncEcho()
    asyncio.run(episode(env))
    assert env.threads == {threading.get_ident()}


def test_a_gymnasium_wrapper_is_driven_and_the_environment_below_it_shown() -> None:
    env = Echo()
    wrapped = gymnasium.wrappers.TimeLimit(env, 2)

    async def play() -> Any:
        session = EnvSession(wrapped, env_id="E")
        assert session.env is env
        await session.reset(0)
        flags = [(await session.step(say("x"))).truncated for _ in range(2)]
        await session.close()
        return flags

    assert run(play) == [False, True]


def test_a_tool_environment_is_given_the_message_and_tells_its_schemas() -> None:
    class Door(ToolEnv):
        def start(self, options: Any) -> str:
            return f"Open {options['which']}."

        @tool
        def open(self) -> str:
            """Open it."""
            self.finish(Reward({"opened": 1.0}, success=True))
            return "It opens."

    async def play() -> Any:
        session = EnvSession(Door(), env_id="Door-v0")
        opening = await session.reset(0, {"which": "the left one"})
        unread = await session.invalid_action("no JSON")
        done = await session.step(Message("assistant", "", tool_calls=(ToolCall("c7", "open", {}),)))
        await session.close()
        return session.tool_schemas, opening, unread, done

    schemas, opening, unread, done = run(play)
    parameters = {"type": "object", "properties": {}, "required": []}
    function = {"name": "open", "description": "Open it.", "parameters": parameters}
    assert schemas == ({"type": "function", "function": function},)
    assert opening.messages[0].content == "Open the left one."
    assert (unread.messages[0].content, unread.done) == ("no JSON", False)
    assert done.messages == (Message("tool", "It opens.", tool_call_id="c7", name="open"),)
    assert (done.reward, done.success, done.terminated) == (1.0, True, True)


class Bare:
    """Nothing but reset and step."""

    def reset(self, seed: int) -> Any:
        return f"task {seed}", {}

    def step(self, action: str) -> Any:
        return action, 1.0, True, False, {}


def test_a_plain_object_is_enough() -> None:
    async def play() -> Any:
        session = EnvSession(Bare(), env_id="Bare")
        results = [await session.reset(3), await session.invalid_action("no JSON"), await session.step(say("x"))]
        await session.close()
        return session.tool_schemas, results

    schemas, (opening, unread, done) = run(play)
    assert schemas == ()
    assert opening.messages[0].content == "task 3"
    assert (unread.messages, unread.reward, unread.done) == ((Message("user", "no JSON"),), 0.0, False)
    assert done.reward == 1.0


def test_options_that_reset_does_not_take_are_an_error_and_no_options_are_not() -> None:
    async def play() -> None:
        session = EnvSession(Bare(), env_id="Bare")
        await session.reset(3, {})
        with pytest.raises(ContractError, match=r"^Bare: expected reset.*takes no 'options' but \['seed'\]"):
            await session.reset(3, {"level": 1})
        await session.close()

    run(play)


def test_a_reset_without_seed_is_an_error() -> None:
    class Seedless:
        def reset(self) -> Any:
            return "go", {}

        def step(self, action: str) -> Any:
            return "bye", 0.0, True, False, {}

    async def play() -> None:
        session = EnvSession(Seedless(), env_id="Seedless")
        with pytest.raises(ContractError, match="takes no 'seed' but nothing"):
            await session.reset(3)
        await session.close()

    run(play)


@pytest.mark.parametrize("thing", [object(), None, "GuessNumber"])
def test_what_is_no_environment_is_refused(thing: Any) -> None:
    with pytest.raises(ContractError, match=r"^E: expected an object with reset and step, got "):
        EnvSession(thing, env_id="E")


# -- failures --------------------------------------------------------------------------------------------------------


def raising(method: str, error: BaseException) -> Callable[[str], Any]:
    def trouble(called: str) -> Any:
        if called == method:
            raise error
        return None

    return trouble


class PanicError(BaseException):
    """As an extension in Rust raises it: no Exception."""


# KeyboardInterrupt in the loop's thread is not tried: there it may be the user's.
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        *product(
            [Echo, AsyncEcho, LaterEcho],
            [
                *(KeyError("x"), TimeoutError("socket"), SystemExit(2), GeneratorExit(), PanicError("x")),
                asyncio.CancelledError("mine"),
            ],
        ),
        *product([Echo], [KeyboardInterrupt("mine"), StopIteration("x")]),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else repr(value),
)
def test_what_step_raises_is_an_env_error(kind: type[Echo], error: BaseException) -> None:
    env = kind(raising("step", error))
    with pytest.raises(EnvError, match=rf"^Echo-v0: step\(\) raised {type(error).__name__}") as caught:
        asyncio.run(episode(env, step_timeout_seconds=10.0))
    assert not isinstance(caught.value, EnvTimeoutError)
    assert isinstance(caught.value.__cause__, type(error))
    assert env.num_closed == 1


class Interrupting(ToolEnv):
    """Its plain tool runs in a thread, because `end_turn` is async."""

    def start(self, options: Any) -> str:
        return "Go."

    @tool
    def interrupt(self) -> str:
        """Interrupt."""
        raise KeyboardInterrupt

    async def end_turn(self) -> None: ...


def test_a_tool_in_a_thread_that_interrupts_fails_its_episode_and_not_the_loop() -> None:
    async def play() -> None:
        session = EnvSession(Interrupting(), env_id="Interrupting", step_timeout_seconds=10.0)
        await session.reset(0)
        with pytest.raises(EnvError, match="raised KeyboardInterrupt"):
            await session.step(Message("assistant", "", (ToolCall("c0", "interrupt", {}),)))
        await session.close()

    run(play)


class Miscounts:
    """Raises two calls below `step`, in a library's function, as an author's mistake does."""

    def reset(self, seed: int) -> Any:
        return "Go.", {}

    def step(self, action: str) -> Any:
        return self._score(action), 1.0, True, False, {}

    def _score(self, action: str) -> str:
        return str(statistics.mean(map(float, action.split())))  # the line that is named


class MiscountsLater(Miscounts):
    async def step(self, action: str) -> Any:  # type: ignore[override]
        return super().step(action)


def test_an_environments_own_env_error_keeps_its_cause() -> None:
    """An error that is raised from itself is a circle, which whatever walks down to the cause never ends in."""

    def refuse(method: str) -> str | None:
        if method == "step":
            raise EnvError("no such level") from ValueError("level 9")
        return None

    with pytest.raises(EnvError, match=r"^no such level$") as caught:
        asyncio.run(episode(Echo(refuse)))
    assert repr(caught.value.__cause__) == "ValueError('level 9')"
    caught.value.__cause__ = circle = EnvError("again")
    circle.__cause__ = caught.value
    assert refusal_in(circle) is None


@pytest.mark.parametrize("kind", [Miscounts, MiscountsLater])
def test_an_error_names_the_file_and_the_line_of_the_authors_code(kind: type[Any]) -> None:
    async def play() -> None:
        session = await open_session(kind, env_id="Miscounts", step_timeout_seconds=10.0)
        try:
            await session.reset(0)
            await session.step(Message("assistant", ""))
        finally:
            await session.close()

    lines = Path(__file__).read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line.endswith("# the line that is named"))
    with pytest.raises(EnvError, match=rf"StatisticsError: .* \(env/test_env_session.py:{number}, in _score: return"):
        asyncio.run(play())


@pytest.mark.parametrize("method", ["reset", "step"])
@pytest.mark.parametrize("kind", [Echo, AsyncEcho])
def test_a_wrong_answer_is_a_contract_error(kind: type[Echo], method: str) -> None:
    with pytest.raises(ContractError, match=rf"^Echo-v0: {method}\(\): expected \("):
        asyncio.run(episode(kind(lambda called: "wrong" if called == method else None)))


def test_a_wrong_answer_to_an_unreadable_action_is_a_contract_error() -> None:
    class Bad(Echo):
        def invalid_action(self, error: str) -> Any:
            return error

    async def play() -> None:
        session = EnvSession(Bad(), env_id="Bad")
        await session.reset(0)
        with pytest.raises(ContractError, match=r"^Bad: invalid_action\(\): expected \(observation, reward"):
            await session.invalid_action("no JSON")
        await session.close()

    run(play)


@pytest.fixture
def hang() -> Iterator[Hang]:
    made = Hang()
    yield made
    made.over.set()


def test_a_hang_is_a_timeout_and_stalls_nobody_else() -> None:
    entered, over = threading.Event(), threading.Event()
    env = Echo(lambda method: (entered.set(), over.wait())[0] if method == "step" else None)

    async def play() -> None:
        session = EnvSession(env, env_id="Echo-v0", step_timeout_seconds=60.0)
        await session.reset(0)
        hanging = asyncio.create_task(session.step(say("x")))
        await asyncio.to_thread(entered.wait, 60)
        assert len(await episode(Echo())) == 3
        move_clock(asyncio.get_running_loop(), 60.0)
        with pytest.raises(EnvTimeoutError, match=r"^Echo-v0: step\(\) did not answer within 60 seconds"):
            await hanging
        with pytest.raises(UsageError, match=r"step\(\) after step\(\) was given up"):
            await session.step(say("y"))
        with pytest.raises(UsageError, match="make a new environment"):
            await session.reset(0)
        await session.close()

    run(play)
    assert env.num_closed == 0  # it hangs, and no other thread may touch it
    over.set()


@pytest.mark.parametrize("kind", [Echo, AsyncEcho])
def test_an_environment_that_is_only_looked_at_fails_in_close_as_one_that_is_played(kind: type[Echo]) -> None:
    def fail(method: str) -> None:
        raise OSError(f"no {method}")

    async def look(error: Exception | None) -> None:
        async with looking_at(lambda: kind(fail), "Echo-v0"):
            if error is not None:
                raise error

    with pytest.raises(
        EnvError, match=r"^Echo-v0: close\(\) raised OSError: no close \(.*test_env_session.py:\d+, in fail"
    ):
        asyncio.run(look(None))
    with pytest.raises(LookupError, match="of the caller"):  # which came first
        asyncio.run(look(LookupError("of the caller")))


def test_a_plain_close_follows_the_hanging_call_in_the_same_thread(hang: Hang) -> None:
    closed = threading.Event()
    env = Echo(lambda method: {"step": hang, "close": closed.set}.get(method, int)())

    async def play() -> None:
        session = EnvSession(env, env_id="Echo-v0", step_timeout_seconds=hang.seconds)
        await session.reset(0)
        with pytest.raises(EnvTimeoutError):
            await session.step(say("x"))
        await session.close()

    run(lambda: hang.watched(play()))
    assert not closed.is_set()
    hang.over.set()
    assert closed.wait(60)
    assert len(env.threads) == 1


def test_a_cancelled_call_is_waited_for_before_closing() -> None:
    entered, go_on = threading.Event(), threading.Event()
    order: list[str] = []

    def trouble(method: str) -> None:
        if method == "step":
            entered.set()
            go_on.wait(5)
        order.append(method)

    env = Echo(trouble)

    async def play() -> None:
        session = EnvSession(env, env_id="Echo-v0", step_timeout_seconds=5.0)
        await session.reset(0)
        stepping = asyncio.create_task(session.step(say("x")))
        await asyncio.to_thread(entered.wait, 5)
        stepping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stepping
        go_on.set()
        await session.close()
        assert env.num_closed == 1  # when close returns, it has happened

    run(play)
    assert order == ["reset", "step", "close"]
    assert len(env.threads) == 1


def test_async_code_that_does_not_give_in_is_left_behind() -> None:
    released = []

    class Stubborn(AsyncEcho):
        async def step(self, action: str) -> Any:
            move_clock(asyncio.get_running_loop(), 60.0)
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    released.append("asked")
                    if len(released) > 1:
                        raise

    async def play() -> None:
        session = EnvSession(Stubborn(), env_id="S", step_timeout_seconds=60.0)
        await session.reset(0)
        with pytest.raises(EnvTimeoutError):
            await session.step(say("x"))
        closing = asyncio.create_task(session.close())
        await begun()
        move_clock(asyncio.get_running_loop(), 60.0)
        await closing

    run(play)
    assert released[0] == "asked"


def test_an_async_call_that_is_cancelled_can_be_closed_at_once() -> None:
    class Waits(AsyncEcho):
        async def step(self, action: str) -> Any:
            await asyncio.Event().wait()

    env = Waits()

    async def play() -> None:
        session = EnvSession(env, env_id="W", step_timeout_seconds=5.0)
        await session.reset(0)
        stepping = asyncio.create_task(session.step(say("x")))
        await asyncio.sleep(0)
        stepping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stepping
        await session.close()

    run(play)
    assert env.num_closed == 1


# -- closing ---------------------------------------------------------------------------------------------------------


def test_closing_twice_closes_once_and_ends_the_session() -> None:
    env = Echo()

    async def play() -> None:
        session = EnvSession(env, env_id="E")
        await session.reset(0)
        await session.close()
        await session.close()
        with pytest.raises(UsageError, match=r"E: step\(\) after close\(\)"):
            await session.step(say("x"))

    run(play)
    assert env.num_closed == 1


@pytest.mark.parametrize("kind", [Echo, AsyncEcho])
def test_a_failing_close_is_an_env_error_once(kind: type[Echo]) -> None:
    async def play() -> None:
        session = EnvSession(kind(raising("close", OSError("busy"))), env_id="E")
        with pytest.raises(EnvError, match=r"E: close\(\) raised OSError: busy"):
            await session.close()
        await session.close()

    run(play)


def test_a_hanging_close_is_a_timeout(hang: Hang) -> None:
    async def play() -> None:
        env = Echo(lambda method: hang() if method == "close" else None)
        session = EnvSession(env, env_id="E", step_timeout_seconds=hang.seconds)
        with pytest.raises(EnvTimeoutError, match=r"E: close\(\) did not answer"):
            await session.close()

    run(lambda: hang.watched(play()))


def test_two_hundred_sessions_run_beside_each_other() -> None:
    async def play() -> int:
        barrier = asyncio.Barrier(200)

        async def one(number: int) -> int:
            session = EnvSession(Echo(), env_id="E")
            await session.reset(number)
            await barrier.wait()  # all are open at once
            answers = [await session.step(say(f"{number}-{turn}")) for turn in range(3)]
            await session.close()
            return sum(a.messages[0].content == f"{number}-{t}" for t, a in enumerate(answers))

        return sum(await asyncio.gather(*map(one, range(200))))

    assert run(play) == 600


async def proven_quick(*names: str, **options: Any) -> QuickCalls:
    """Return shared calls that have seen quick calls of "Echo" and `names`, by a clock that stands still."""
    quick = QuickCalls(**{"clock": lambda: 0.0} | options)
    owner = OwnThread()
    for name in ("Echo", *names):
        while not quick.is_quick(name):
            await quick.call(owner, name, int)
    return quick


class Movable(Echo):
    any_thread = True


class Impatient(Movable):
    max_action_seconds = 999.0


class Tied(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper of an author, who has not said that it may run in any thread."""


@pytest.mark.parametrize(
    ("make", "seconds", "is_shared"),
    [
        (Movable, None, True),
        (Movable, 301.0, True),
        (Movable, 299.0, False),  # it could wait longer for others than its limit allows
        (lambda trouble: gymnasium.wrappers.TimeLimit(Movable(trouble), 9), None, True),
        (Echo, None, False),
        (lambda trouble: Tied(Movable(trouble)), None, False),
        (Impatient, None, False),  # the time of others would count as its action's
    ],
)
def test_quick_environments_share_a_thread_if_they_say_that_they_may(
    make: Any, seconds: float | None, is_shared: bool
) -> None:
    async def play() -> None:
        quick = await proven_quick(patience_seconds=60.0)
        gate, ran = threading.Event(), []
        session = await open_session(
            lambda: make(lambda method: ran.append(method)), env_id="Echo", step_timeout_seconds=seconds, quick=quick
        )
        blocked = asyncio.create_task(quick.call(OwnThread(), "Echo", lambda: (gate.wait(), ran.append("blocked"))))
        reset = asyncio.create_task(session.reset(1))
        if not is_shared:
            await asyncio.wait_for(reset, 5)  # ends although the shared thread is taken
        gate.set()
        await asyncio.gather(blocked, reset)
        assert ran == (["blocked", "reset"] if is_shared else ["reset", "blocked"])
        assert (await session.step(say("stop"))).terminated
        await session.close()
        assert ran[2:] == ["step", "close"]

    run(play)


def test_an_environment_that_hangs_in_the_shared_thread_is_named_closed_there_and_delays_no_other() -> None:
    async def play() -> None:
        now = [0.0]
        quick = await proven_quick(patience_seconds=0.01, clock=lambda: now[0])
        over, closed = threading.Event(), threading.Event()

        def hang() -> None:
            now[0] += 0.01
            over.wait()

        hanging = Movable(lambda method: {"step": hang, "close": closed.set}.get(method, int)())
        session = await open_session(lambda: hanging, env_id="Echo", step_timeout_seconds=60.0, quick=quick)
        others = [await open_session(Movable, env_id="Echo", step_timeout_seconds=None, quick=quick) for _ in range(3)]
        for each in (session, *others):
            await each.reset(1)
        assert len(hanging.threads) == 1
        late = asyncio.create_task(session.step(say("on")))
        for result in await asyncio.gather(*(each.step(say("stop")) for each in others)):
            assert result.terminated
        move_clock(asyncio.get_running_loop(), 60.0)
        with pytest.raises(EnvTimeoutError, match=r"Echo: step\(\) did not answer within 60 seconds"):
            await late
        await asyncio.gather(*(each.close() for each in (session, *others)))
        assert not closed.is_set()
        over.set()
        assert await asyncio.to_thread(closed.wait, 60)
        assert len(hanging.threads) == 1  # close waited for the step, in its thread

    run(play)


@pytest.mark.parametrize(
    ("make", "seconds", "is_shared"), [(Movable, None, True), (Movable, 301.0, True), (Movable, 299.0, False)]
)
def test_environments_that_are_quickly_made_are_made_in_the_shared_thread(
    make: Any, seconds: float | None, is_shared: bool
) -> None:
    async def play() -> None:
        quick = await proven_quick("Echo()", patience_seconds=60.0)
        gate, order = threading.Event(), []

        def factory() -> Any:
            order.append("made")
            return make()

        blocked = asyncio.create_task(quick.call(OwnThread(), "Echo", lambda: (gate.wait(), order.append("blocked"))))
        opened = asyncio.create_task(open_session(factory, env_id="Echo", step_timeout_seconds=seconds, quick=quick))
        if not is_shared:
            await asyncio.wait_for(asyncio.shield(opened), 5)  # ends although the shared thread is taken
        gate.set()
        await blocked
        await (await opened).close()
        assert order == (["blocked", "made"] if is_shared else ["made", "blocked"])

    run(play)


def test_an_environment_that_is_made_late_in_the_shared_thread_is_closed_there() -> None:
    closed = threading.Event()

    async def play() -> None:
        quick = await proven_quick("Echo()", patience_seconds=10.0)
        gate = threading.Event()

        def factory() -> Movable:
            return Movable(lambda method: closed.set() if method == "close" else None)

        blocked = asyncio.create_task(quick.call(OwnThread(), "Echo", gate.wait))
        opening = asyncio.create_task(open_session(factory, env_id="Echo", step_timeout_seconds=60.0, quick=quick))
        await begun()  # it is asked for, and waits behind the other
        move_clock(asyncio.get_running_loop(), 60.0)
        with pytest.raises(EnvTimeoutError, match="making the environment took longer than 60 seconds"):
            await opening
        gate.set()
        await blocked
        assert await asyncio.to_thread(closed.wait, 60)

    run(play)


def test_an_environment_that_is_tied_to_a_thread_is_made_there_whatever_others_of_its_name_say() -> None:
    class Connected(Echo):
        def __init__(self) -> None:
            super().__init__()
            self.threads.add(threading.get_ident())

    async def play() -> None:
        quick = await proven_quick("Echo()")
        opened = (open_session(Connected, env_id="Echo", step_timeout_seconds=None, quick=quick) for _ in range(4))
        sessions = await asyncio.gather(*opened)
        await asyncio.gather(*(session.reset(1) for session in sessions))
        await asyncio.gather(*(session.close() for session in sessions))
        assert [len(session.env.threads) for session in sessions] == [1] * 4

    run(play)


def test_close_waits_for_a_step_that_misses_its_deadline_before_it_begins() -> None:
    ran: list[str] = []

    async def play() -> None:
        quick = await proven_quick()
        session = EnvSession(Movable(ran.append), env_id="Echo", step_timeout_seconds=9.0, quick=quick)
        step = asyncio.create_task(session.step(say("on")))
        await asyncio.sleep(0)  # the step is asked for
        move_clock(asyncio.get_running_loop(), 10.0)
        with pytest.raises(EnvTimeoutError):
            await step
        await session.close()
        assert ran == ["step", "close"]

    run(play)
