"""run_episode: the one loop, its limits, and what a failure becomes.

Pinned here:

1.  A good episode: the record is the wrapper's, with timing; environment and engine session are closed once.
2.  Every kind of failure has its outcome, one line of error, keeps the turns played, and closes everything.
3.  The episode's deadline is watched between waits (any clock) and during them.
4.  A first prompt that does not fit is a record without turns.
5.  Cancellation closes and propagates; a poisoned engine propagates after closing.
6.  A failure to close is the episode's failure unless it had failed before.
7.  Renderers are probed once per set of tools.
8.  An environment is made in the thread in which it will run; one that hangs or comes too late is closed there.
9.  The episodes of a player share a thread for quick calls, if their environments may run in any.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from moved_clock import Hang, move_clock

from gspo_gym.chat.renderer import RendererCache
from gspo_gym.engine.scripted import Failures, Latency, ScriptedEngine
from gspo_gym.errors import ActionLimitError, EngineError, EnginePoisonedError, EnvDiedError
from gspo_gym.policy.load import tiny_tokenizer
from gspo_gym.rollout.actors import Actor, ActRequest, EngineActor
from gspo_gym.rollout.episode import EpisodeRequest, episode_player, run_episode
from gspo_gym.rollout.limits import EpisodeLimits
from gspo_gym.seeding import child_seed
from gspo_gym.types import Completion, Outcome, Task, Timing, Trajectory

END = 258  # <|im_end|>
TASK = Task("Echo-v0", seed=5)


class Echo:
    """Says back what it hears, 0.25 a turn, until it hears "stop". `trouble` may break one method in one way."""

    def __init__(self, trouble: Callable[[str], Any] = lambda method: None) -> None:
        self.trouble = trouble
        self.num_closed = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.trouble("reset") or (f"seed {seed}", {})

    def step(self, action: str) -> Any:
        return self.trouble("step") or (action, 0.25, action == "stop", False, {})

    def close(self) -> None:
        self.num_closed += 1
        self.trouble("close")


@pytest.fixture
def hang() -> Iterator[Hang]:
    made = Hang()
    yield made
    made.over.set()


def answers(*texts: str) -> list[list[int]]:
    return [[*text.encode(), END] for text in texts]


def play(
    env: Any,
    act: Actor | ScriptedEngine,
    *,
    task: Task = TASK,
    clock: Callable[[], float] | None = None,
    make_env: Callable[[Task], Any] | None = None,
    hang: Hang | None = None,
    **limits: Any,
) -> Trajectory:
    bounds = {"max_turns": 4, "max_output_tokens": 16, "max_model_len": 512, "step_timeout_seconds": 5.0} | limits
    extra = {} if clock is None else {"clock": clock}
    episode = run_episode(
        EpisodeRequest("g0/0", task, sampling_seed=11),
        make_env=make_env or (lambda task: env),
        act=EngineActor(act) if isinstance(act, ScriptedEngine) else act,
        renderers=RendererCache(tiny_tokenizer()),
        limits=EpisodeLimits(**bounds),
        **extra,
    )
    return asyncio.run(episode if hang is None else hang.watched(episode))


def test_a_good_episode_is_recorded_and_closed() -> None:
    env, engine = Echo(), ScriptedEngine(answers("one", "stop"))
    episode = play(env, engine)
    assert episode.outcome is Outcome.TERMINATED
    assert episode.error is None
    assert episode.reward == 0.5
    assert [m.content for m in episode.messages] == ["seed 5", "one", "one", "stop", "stop"]
    assert (episode.trajectory_id, episode.attempt, episode.task, episode.sampling_seed) == ("g0/0", 0, TASK, 11)
    # The second prompt is what was sampled for the first plus the environment's part: token for token the segment.
    second_prompt = engine.calls[1].prompt_token_ids
    start, _ = episode.turns[1].action_span
    assert tuple(episode.segments[0].token_ids[:start].tolist()) == second_prompt
    assert env.num_closed == 1


def test_a_turn_is_sampled_with_its_own_seed_and_the_limits_of_its_place() -> None:
    engine = ScriptedEngine(answers("one", "stop"))
    play(Echo(), engine, max_model_len=66)
    first, second = (call.sampling for call in engine.calls)
    assert (first.seed, second.seed) == (child_seed(11, "turn", 0), child_seed(11, "turn", 1))
    assert [call.session_id for call in engine.calls] == ["g0/0/0", "g0/0/0"]
    # Prompts: 19 + len("seed 5") = 25, then 25 + len("one") + 1 + 1 + 19 + len("one") = 52. 66 - 52 = 14 < 16.
    assert (first.max_tokens, second.max_tokens) == (16, 14)
    assert END in first.stop_token_ids


def test_time_is_split_into_environment_and_engine() -> None:
    now = 0.0

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds

    async def thinking(seconds: float) -> None:
        spend(seconds)

    env = Echo(lambda method: spend({"reset": 1.0, "step": 2.0, "close": 4.0}[method]))
    engine = ScriptedEngine(answers("one", "stop"), latency=Latency(per_call_seconds=8.0), sleep=thinking)
    episode = play(env, engine, clock=lambda: now)
    # 1 reset + 2 steps of 2 s; 2 calls of 8 s; closing counts in the total only: 5 + 16 + 4.
    assert episode.timing == Timing(total_seconds=25.0, env_seconds=5.0, engine_seconds=16.0)


def failing(method: str, error: BaseException) -> Callable[[str], Any]:
    def trouble(called: str) -> Any:
        if called == method:
            raise error
        return None

    return trouble


@pytest.mark.parametrize(
    ("method", "num_turns", "num_messages"), [("reset", 0, 0), ("step", 1, 2)], ids=["reset", "step"]
)
def test_an_environment_that_raises_is_an_environment_error(method: str, num_turns: int, num_messages: int) -> None:
    env = Echo(failing(method, ZeroDivisionError("by zero,\nin two lines")))
    episode = play(env, ScriptedEngine(answers("one")))
    assert episode.outcome is Outcome.ENV_ERROR
    assert episode.error is not None
    for part in ("Echo-v0", method, "ZeroDivisionError", "by zero, in two lines"):
        assert part in episode.error
    assert (len(episode.turns), len(episode.messages)) == (num_turns, num_messages)
    assert not episode.is_scored
    assert env.num_closed == 1


@pytest.mark.parametrize(
    "answer",
    [
        ("too", "short"),
        "no tuple",
        (17, 0.0, False, False, {}),
        ("ok", float("nan"), False, False, {}),
        ("ok", float("inf"), False, False, {}),
        ("ok", "0.5", False, False, {}),
        ("ok", 0.0, "no", False, {}),
        ([], 0.0, False, False, {}),
        ([{"role": "wizard", "content": "x"}], 0.0, False, False, {}),
    ],
    ids=repr,
)
def test_a_broken_answer_is_an_environment_error_and_never_a_reward(answer: Any) -> None:
    env = Echo(lambda method: answer if method == "step" else None)
    episode = play(env, ScriptedEngine(answers("one")))
    assert episode.outcome is Outcome.ENV_ERROR
    assert episode.error is not None
    assert "Echo-v0" in episode.error
    assert [turn.reward for turn in episode.turns] == [None]
    assert env.num_closed == 1


@pytest.mark.parametrize("method", ["reset", "step"])
def test_an_environment_that_hangs_is_a_timeout(method: str, hang: Hang) -> None:
    env = Echo(lambda called: hang() if called == method else None)
    episode = play(env, ScriptedEngine(answers("one")), hang=hang, step_timeout_seconds=hang.seconds)
    assert episode.outcome is Outcome.ENV_TIMEOUT
    assert episode.error is not None
    assert "Echo-v0" in episode.error
    assert method in episode.error


def test_ten_megabytes_of_text_end_in_a_full_context_and_keep_the_reward() -> None:
    env = Echo(lambda method: ("x" * 10_000_000, 0.25, False, False, {}) if method == "step" else None)
    episode = play(env, ScriptedEngine(answers("one")))
    assert episode.outcome is Outcome.CONTEXT_OVERFLOW
    assert episode.error is None
    assert episode.reward == 0.25
    assert len(episode.segments[0]) == 25 + 4


def test_text_that_no_tokenizer_takes_is_an_environment_error() -> None:
    env = Echo(lambda method: ("\ud800", 0.0, False, False, {}) if method == "step" else None)
    episode = play(env, ScriptedEngine(answers("one")))
    assert episode.outcome is Outcome.ENV_ERROR
    assert env.num_closed == 1


def test_a_constructor_that_raises_is_an_environment_error() -> None:
    def make_env(task: Task) -> Any:
        raise OSError(f"no data for {task.task_id}")

    episode = play(None, ScriptedEngine([]), make_env=make_env)
    assert episode.outcome is Outcome.ENV_ERROR
    assert episode.error is not None
    assert "Echo-v0: making the environment raised OSError: no data for Echo-v0#5" in episode.error
    assert episode.segments == ()


def test_an_object_that_is_no_environment_is_an_environment_error() -> None:
    episode = play(None, ScriptedEngine([]), make_env=lambda task: "no environment")
    assert episode.outcome is Outcome.ENV_ERROR
    assert episode.error is not None
    assert "Echo-v0: expected an object with reset and step" in episode.error


def test_an_environment_is_made_in_the_thread_in_which_it_runs() -> None:
    threads: list[int] = []

    def make_env(task: Task) -> Any:
        threads.append(threading.get_ident())
        return Echo(lambda method: threads.append(threading.get_ident()))

    play(None, ScriptedEngine(answers("one", "stop")), make_env=make_env)
    assert len(threads) == 5  # made, reset, two steps, close
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()


def test_an_environment_that_comes_too_late_is_closed_then(hang: Hang) -> None:
    is_closed = threading.Event()

    def make_env(task: Task) -> Any:
        hang()
        return Echo(lambda method: is_closed.set() if method == "close" else None)

    episode = play(None, ScriptedEngine([]), make_env=make_env, hang=hang, step_timeout_seconds=hang.seconds)
    assert episode.outcome is Outcome.ENV_TIMEOUT
    assert episode.error is not None
    assert "Echo-v0: making the environment took longer than 60 seconds" in episode.error
    hang.over.set()
    assert is_closed.wait(timeout=60)


def test_cancelled_while_the_environment_is_made_it_is_closed_all_the_same() -> None:
    may_come = threading.Event()
    env = Echo()

    def make_env(task: Task) -> Any:
        loop.call_soon_threadsafe(started.set)
        may_come.wait()
        return env

    async def cancel_it() -> None:
        nonlocal loop, started
        loop, started = asyncio.get_running_loop(), asyncio.Event()
        task = asyncio.create_task(
            run_episode(
                EpisodeRequest("g0/0", TASK, sampling_seed=0),
                make_env=make_env,
                act=EngineActor(ScriptedEngine([])),
                renderers=RendererCache(tiny_tokenizer()),
                limits=EpisodeLimits(max_turns=1, max_output_tokens=8, max_model_len=512),
            )
        )
        await started.wait()
        task.cancel()
        loop.call_later(0.01, may_come.set)
        with pytest.raises(asyncio.CancelledError):
            await task

    loop: asyncio.AbstractEventLoop
    started: asyncio.Event
    asyncio.run(cancel_it())
    assert env.num_closed == 1


@pytest.mark.parametrize(
    ("cause", "error"),
    [
        (ConnectionResetError("by peer"), "EngineError: no answer: timed out (from ConnectionResetError: by peer)"),
        (OSError("timed out"), "EngineError: no answer: timed out"),
        (None, "EngineError: no answer: timed out"),
    ],
)
def test_the_error_names_its_cause_unless_it_has_its_words(cause: Exception | None, error: str) -> None:
    class Failing(ScriptedEngine):
        async def generate(self, *arguments: Any, **options: Any) -> Completion:
            raise EngineError("no answer: timed out") from cause

    assert play(Echo(), Failing(answers("one"))).error == error


def test_a_failing_engine_is_an_engine_error() -> None:
    env = Echo()
    episode = play(env, ScriptedEngine(answers("one", "stop"), failures=Failures(every=2)))
    assert episode.outcome is Outcome.ENGINE_ERROR
    assert episode.error == "EngineError: scripted failure of call 2"
    assert [turn.reward for turn in episode.turns] == [0.25]
    assert not episode.is_scored
    assert env.num_closed == 1


def test_an_engine_with_a_smaller_context_is_an_engine_error_not_an_overflow() -> None:
    episode = play(Echo(), ScriptedEngine(answers("one"), max_model_len=8))
    assert episode.outcome is Outcome.ENGINE_ERROR


class Answering:
    """An actor made of a function."""

    def __init__(self, answer: Callable[[ActRequest], Any]) -> None:
        self.answer = answer
        self.ended: list[str] = []

    async def __call__(self, request: ActRequest) -> Completion:
        return self.answer(request)  # type: ignore[no-any-return]

    async def end_session(self, session_id: str) -> None:
        self.ended.append(session_id)


def completion(token_ids: list[int]) -> Completion:
    return Completion(token_ids, [-1.0] * len(token_ids), None, [0] * len(token_ids))  # type: ignore[arg-type]


@pytest.mark.parametrize("token_ids", [[1] * 17, [END, 1]], ids=["too long", "past its stop"])
def test_ids_that_cannot_have_been_sampled_are_an_engine_error(token_ids: list[int]) -> None:
    act = Answering(lambda request: completion(token_ids))
    episode = play(Echo(), act)
    assert episode.outcome is Outcome.ENGINE_ERROR
    assert episode.error is not None
    assert episode.error.startswith("RecordError: token_ids:")
    assert episode.turns == ()
    assert act.ended == ["g0/0/0"]


def test_the_deadline_is_checked_before_each_turn() -> None:
    now = 0.0

    def answer(request: ActRequest) -> Completion:
        nonlocal now
        now += 40.0
        return completion([1, END])

    episode = play(Echo(), Answering(answer), clock=lambda: now, episode_timeout_seconds=100.0)
    # Turns start at 0, 40 and 80; at 120 the next one may not.
    assert episode.outcome is Outcome.EPISODE_TIMEOUT
    assert len(episode.turns) == 3
    assert episode.error is not None
    assert "longer than 100 seconds" in episode.error


def test_max_turns_comes_before_the_deadline() -> None:
    now = 0.0

    def answer(request: ActRequest) -> Completion:
        nonlocal now
        now += 40.0
        return completion([1, END])

    episode = play(Echo(), Answering(answer), clock=lambda: now, episode_timeout_seconds=100.0, max_turns=3)
    assert episode.outcome is Outcome.MAX_TURNS
    assert episode.reward == 0.75


def test_the_deadline_is_watched_while_the_engine_hangs() -> None:
    async def think(seconds: float) -> None:
        if len(engine.calls) == 2:
            move_clock(asyncio.get_running_loop(), 60.0)
            await asyncio.Event().wait()

    env = Echo()
    engine = ScriptedEngine(answers("one", "two"), latency=Latency(per_call_seconds=1.0), sleep=think)
    episode = play(env, engine, episode_timeout_seconds=60.0)
    assert episode.outcome is Outcome.EPISODE_TIMEOUT
    assert episode.error is not None
    assert "in the engine after 1 turns" in episode.error
    assert env.num_closed == 1


def test_the_deadline_is_watched_while_the_environment_hangs(hang: Hang) -> None:
    """Closing waits for the step, which is over once the engine has ended the session."""

    class Ending(EngineActor):
        async def end_session(self, session_id: str) -> None:
            hang.over.set()

    env = Echo(lambda method: hang() if method == "step" else None)
    act = Ending(ScriptedEngine(answers("one")))
    episode = play(env, act, hang=hang, episode_timeout_seconds=60.0, step_timeout_seconds=99.0)
    assert episode.outcome is Outcome.EPISODE_TIMEOUT
    assert episode.error is not None
    assert "in the environment after 1 turns" in episode.error
    assert env.num_closed == 1


def test_the_time_in_which_the_environment_is_made_does_not_count() -> None:
    now = 0.0

    def make_env(task: Task) -> Any:
        nonlocal now
        now += 1000.0
        return Echo()

    episode = play(
        None, ScriptedEngine(answers("stop")), make_env=make_env, clock=lambda: now, episode_timeout_seconds=100.0
    )
    assert episode.outcome is Outcome.TERMINATED


@pytest.mark.parametrize(
    ("seconds", "outcome"),
    [(20.0, Outcome.EPISODE_TIMEOUT), (25.0, Outcome.EPISODE_TIMEOUT), (30.0, Outcome.ACTION_LIMIT)],
    ids=str,
)
def test_a_late_episode_is_the_actions_doing_if_answers_took_more_than_half_of_it(
    seconds: float, outcome: Outcome
) -> None:
    """Two answers of 20, 25 or 30 seconds, of 100; whenever they are played again they take 30 each."""
    now, num_made = 0.0, 0

    def make_env(task: Task) -> Any:
        nonlocal num_made
        num_made += 1
        return Echo(spend if num_made == 1 else lambda method: spend(method, 30.0))

    def spend(method: str, step_seconds: float = seconds) -> None:
        nonlocal now
        now += step_seconds if method == "step" else 0.0

    def answer(request: ActRequest) -> Completion:
        nonlocal now
        now += 35.0
        return completion([1, END])

    episode = play(None, Answering(answer), make_env=make_env, clock=lambda: now, episode_timeout_seconds=100.0)
    assert len(episode.turns) == 2
    assert episode.outcome is outcome


def test_a_first_prompt_that_does_not_fit_is_a_record_without_turns() -> None:
    env = Echo()
    episode = play(env, ScriptedEngine([]), max_model_len=25)  # 19 + len("seed 5")
    assert episode.outcome is Outcome.CONTEXT_OVERFLOW
    assert episode.turns == ()
    assert episode.error is not None
    assert "the first prompt has 25 tokens" in episode.error
    assert not episode.is_scored
    assert env.num_closed == 1


def test_cancellation_closes_everything_and_propagates() -> None:
    env, ended = Echo(), []

    class Waiting:
        async def __call__(self, request: ActRequest) -> Completion:
            started.set()
            await asyncio.Event().wait()
            raise AssertionError("never reached")

        async def end_session(self, session_id: str) -> None:
            ended.append(session_id)

    async def cancel_it() -> None:
        nonlocal started
        started = asyncio.Event()
        task = asyncio.create_task(
            run_episode(
                EpisodeRequest("g0/0", TASK, sampling_seed=0, attempt=2),
                make_env=lambda task: env,
                act=Waiting(),
                renderers=RendererCache(tiny_tokenizer()),
                limits=EpisodeLimits(max_turns=1, max_output_tokens=8, max_model_len=512),
            )
        )
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    started: asyncio.Event
    asyncio.run(cancel_it())
    assert env.num_closed == 1
    assert ended == ["g0/0/2"]


def test_a_cancellation_that_comes_while_closing_waits_until_all_is_closed() -> None:
    env = Echo()

    class Slow(Answering):
        async def end_session(self, session_id: str) -> None:
            is_closing.set()
            await may_close.wait()

    async def cancel_it() -> None:
        nonlocal is_closing, may_close
        is_closing, may_close = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(
            run_episode(
                EpisodeRequest("g0/0", TASK, sampling_seed=0),
                make_env=lambda task: env,
                act=Slow(lambda request: completion([*b"stop", END])),
                renderers=RendererCache(tiny_tokenizer()),
                limits=EpisodeLimits(max_turns=1, max_output_tokens=8, max_model_len=512),
            )
        )
        await is_closing.wait()
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
        may_close.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert env.num_closed == 1

    is_closing: asyncio.Event
    may_close: asyncio.Event
    asyncio.run(cancel_it())


def test_a_poisoned_engine_is_not_an_episodes_failure() -> None:
    env = Echo()

    def answer(request: ActRequest) -> Completion:
        raise EnginePoisonedError("half an update")

    act = Answering(answer)
    with pytest.raises(EnginePoisonedError, match="half an update"):
        play(env, act)
    assert env.num_closed == 1
    assert act.ended == ["g0/0/0"]


def test_a_failure_to_close_is_the_episodes_failure() -> None:
    episode = play(Echo(failing("close", OSError("busy"))), ScriptedEngine(answers("stop")))
    assert episode.outcome is Outcome.ENV_ERROR
    assert episode.error is not None
    assert episode.error.startswith("while closing: ")
    assert "busy" in episode.error


def test_a_hanging_close_is_a_timeout(hang: Hang) -> None:
    env = Echo(lambda method: hang() if method == "close" else None)
    episode = play(env, ScriptedEngine(answers("stop")), hang=hang, step_timeout_seconds=hang.seconds)
    assert episode.outcome is Outcome.ENV_TIMEOUT


def test_a_failure_to_close_does_not_hide_an_earlier_one() -> None:
    def trouble(method: str) -> None:
        if method in ("step", "close"):
            raise OSError(f"{method} is broken")

    episode = play(Echo(trouble), ScriptedEngine(answers("one")))
    assert episode.error is not None
    assert "step is broken" in episode.error
    assert "close" not in episode.error


@pytest.mark.parametrize(("length", "shown"), [(486, "x" * 486), (487, "x" * 483 + "...")])
def test_an_error_of_more_than_500_characters_is_cut(length: int, shown: str) -> None:
    def answer(request: ActRequest) -> Completion:
        raise RuntimeError("x" * length)

    assert play(Echo(), Answering(answer)).error == "RuntimeError: " + shown  # 14 characters before it


def test_the_traceback_of_a_failure_is_in_the_debug_log(caplog: pytest.LogCaptureFixture) -> None:
    def trouble(method: str) -> None:
        if method in ("step", "close"):
            raise OSError(f"{method} is broken")

    with caplog.at_level(logging.DEBUG, logger="gspo_gym.rollout.episode"):
        play(Echo(trouble), ScriptedEngine(answers("one")))
    assert [record.getMessage() for record in caplog.records] == [
        "episode g0/0/0 failed",
        "closing episode g0/0/0 failed",
    ]
    for record, method in zip(caplog.records, ("step", "close"), strict=True):
        assert record.exc_info
        assert f"{method} is broken" in str(record.exc_info[1])


@pytest.mark.parametrize(("options", "outcome"), [({"hard": True}, Outcome.ACTION_LIMIT), ({}, Outcome.ENV_ERROR)])
def test_actions_are_played_again_with_the_tasks_seed_and_options(options: Any, outcome: Outcome) -> None:
    """It dies at a second action in its first episode, and in every hard one of seed 5."""
    made: list[Dying] = []

    class Dying(Echo):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            made.append(self)
            self.options = options
            self.dies = len(made) == 1 or (seed == 5 and options == {"hard": True})
            return super().reset(seed=seed)

        def step(self, action: str) -> Any:
            if self.dies and action == "two":
                raise EnvDiedError("killed")
            return super().step(action)

    task = Task("Echo-v0", seed=5, options=options)
    episode = play(None, ScriptedEngine(answers("one", "two")), task=task, make_env=lambda task: Dying())
    assert episode.outcome is outcome
    assert [env.options for env in made] == [options or None] * 2


def test_a_limit_that_the_player_meets_between_actions_is_not_the_actions_doing() -> None:
    def answer(request: ActRequest) -> Completion:
        if request.turn_index == 1:
            raise ActionLimitError("the policy asked the environment for too much")
        return completion([1, END])

    episode = play(Echo(), Answering(answer))
    assert not episode.is_scored
    assert episode.outcome is Outcome.ENGINE_ERROR


def test_renderers_are_made_once_per_set_of_tools() -> None:
    cache = RendererCache(tiny_tokenizer())
    tool = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}
    plain = cache.for_tools(())
    assert cache.for_tools([]) is plain
    assert cache.for_tools([tool]) is not plain
    assert cache.for_tools([dict(tool)]) is cache.for_tools([tool])


def test_the_episodes_of_a_player_share_the_thread_of_quick_calls() -> None:
    class Movable(Echo):
        any_thread = True

    readers: list[str] = []  # threads that read the clock; a call is timed where it is made

    def clock() -> float:
        readers.append(threading.current_thread().name)
        return 0.0

    async def play_all() -> list[Trajectory]:
        play = episode_player(
            make_env=lambda task: Movable(),
            act=EngineActor(ScriptedEngine(answers("one", "stop") * 20)),
            renderers=RendererCache(tiny_tokenizer()),
            limits=EpisodeLimits(max_turns=4, max_output_tokens=16, max_model_len=512),
            clock=clock,
        )
        return [await play(EpisodeRequest(f"g0/{number}", TASK, sampling_seed=11)) for number in range(10)]

    episodes = asyncio.run(play_all())
    assert [episode.reward for episode in episodes] == [0.5] * 10
    # Each has a reset, two steps and a close; 32 calls are timed before they share a thread, in which the last two
    # episodes' environments are made, too.
    assert readers.count("gspo-gym-env") == 2 * (10 * 4 + 2)
