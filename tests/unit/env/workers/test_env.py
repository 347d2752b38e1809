"""ProcessEnv: what runs in a worker process plays as in a thread, and what goes wrong there stays there.

Pinned here:

1.  Transcripts, rewards with their parts, and players are those of a thread.
2.  A crash, an exception, a missed deadline and an answer that is too long are each their own error.
3.  A process that missed its deadline is dead at once, with all that it started.
4.  A worker sees no secrets, inherits nothing, has limits, and is seeded for every episode.
5.  A clean worker is used again; one that leaked, died or is old is replaced.
6.  Nothing outlives the program.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest

from gspo_gym.env.core import TextEnv
from gspo_gym.env.playing import play
from gspo_gym.env.registry import make
from gspo_gym.env.session import EnvSession, looking_at, open_session
from gspo_gym.env.workers.env import ProcessEnv
from gspo_gym.env.workers.limits import WorkerLimits
from gspo_gym.env.workers.pool import ProcessPool, WorkerProcess
from gspo_gym.errors import ConfigError, ContractError, EnvDiedError, EnvError, EnvTimeoutError, UsageError
from gspo_gym.types import Message

SUBJECT = '''
import ctypes, json, os, random, resource, subprocess, sys, threading, time
import numpy as np
from gspo_gym.env.core import TextEnv
from gspo_gym.env.rewards import Reward

held = []

class Subject(TextEnv):
    """Does what it is told."""

    reward_range = (-1.0, 2.0)

    def __init__(self, word="none", slow=0):
        self.word = word
        if word == "crash":
            os._exit(7)
        if word == "hang":
            threading.Event().wait()
        if word.startswith("once ") and not os.path.exists(word[5:]):
            open(word[5:], "x").close()
            os.kill(os.getpid(), 9)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"{self.word} {seed} {options}", {"array": np.arange(2)}

    def step(self, action):
        name, _, rest = action.partition(" ")
        return getattr(self, "do_" + name)(rest)

    def say(self, value):
        return json.dumps(value), None, False, False, {}

    def do_pid(self, _):
        return self.say(os.getpid())

    def do_rich(self, _):
        return "", Reward({"a": 0.1, "b": 0.2}, events=("won",), success=True), True, False, {}

    def do_draw(self, _):
        return self.say([random.random(), np.random.random()])

    def do_circumstances(self, _):
        limits = {name: resource.getrlimit(getattr(resource, "RLIMIT_" + name))[0] for name in ("CORE", "AS", "NOFILE")}
        links = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if name in "012"]
        return self.say({
            "variables": dict(os.environ), "folder": os.getcwd(), "limits": limits, "links": links,
            "files": len(os.listdir("/proc/self/fd")), "leads": os.getsid(0) == os.getpid() == os.getpgid(0),
        })

    def do_spy(self, pid):
        found = []
        for name in ("environ", "mem", "maps"):
            try:
                with open(f"/proc/{pid}/{name}", "rb") as file:
                    found.append(len(file.read(8)))
            except OSError as error:
                found.append(type(error).__name__)
        return self.say(found)

    def do_raise(self, _):
        raise KeyError("as told")

    def do_segfault(self, _):
        ctypes.string_at(0)

    def do_loop(self, _):
        sum(range(10**12))

    def do_start(self, session):
        """Starts a process that never ends, and says which."""
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"],
                                 start_new_session=session == "new", stdout=subprocess.DEVNULL)
        return self.say(child.pid)

    def do_big(self, _):
        return "x" * 10_485_760, 0.0, False, False, {}

    def do_eat(self, mebibytes):
        bytearray(int(mebibytes) * 2**20)
        return self.say("eaten")

    def do_leak(self, _):
        held.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(20))
        return self.say(len(held))

    def do_exit(self, status):
        sys.exit(int(status))

class Talker(TextEnv):
    """Its players know the hidden number."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.hidden = int(self.np_random.integers(1000))
        return "?", {}

    def step(self, action):
        return "again", float(action == str(self.hidden)), False, False, {}

def knows(env, rng):
    return lambda messages: str(env.hidden)

def guesses(env, rng):
    async def play(messages):
        return f"{len(messages)} {rng.random()!r}"
    return play

def fails(env, rng):
    def play(messages):
        raise RuntimeError("no idea")
    return play

Talker.policies = {"reference": knows, "random": guesses, "failing": fails}

def build(word):
    return Subject(word)
'''


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The module above, in a folder that is on the path."""
    folder = tmp_path_factory.mktemp("subject")
    (folder / "process_env_subject.py").write_text(SUBJECT, encoding="utf-8")
    sys.path.insert(0, str(folder))
    try:
        yield __import__("process_env_subject")
    finally:
        sys.path.remove(str(folder))
        del sys.modules["process_env_subject"]


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    pool = ProcessPool()
    yield pool
    pool.close()


Play = Callable[[EnvSession], Coroutine[Any, Any, Any]]


def run(make_env: Callable[[], Any], play: Play, *, seconds: float = 60.0) -> Any:
    """What `play` returns, in a session that is open and reset."""

    async def go() -> Any:
        session = await open_session(make_env, env_id="Subject", step_timeout_seconds=seconds)
        try:
            await session.reset(0)
            return await play(session)
        finally:
            await session.close()

    return asyncio.run(go())


async def tell(session: EnvSession, action: str) -> Any:
    """What the environment says to an action, from JSON."""
    [message] = (await session.step(Message("assistant", action))).messages
    return json.loads(message.content)


def telling(*actions: str) -> Play:
    async def play(session: EnvSession) -> list[Any]:
        return [await tell(session, action) for action in actions]

    return play


def is_gone(pid: int, seconds: float = 10.0) -> bool:
    """Whether a process is dead within that time; waited for, not polled."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)


# -- 1 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["reference", "random"])
@pytest.mark.parametrize("name", ["GuessNumber", "FrozenLake", "SqlAnalyst"])
def test_an_episode_in_a_process_is_the_one_in_a_thread(name: str, policy: str, pool: ProcessPool) -> None:
    async def episode(make_env: Callable[[], Any], seed: int) -> Any:
        def player(env: Any, rng: np.random.Generator) -> Any:
            return env.policies[policy](env, rng)

        return await play(make_env, player, seed=seed, name=name, max_turns=30, step_timeout_seconds=60)

    async def both() -> list[tuple[Any, Any]]:
        return [
            (await episode(lambda: ProcessEnv(name, pool=pool), seed), await episode(lambda: make(name), seed))
            for seed in range(3)
        ]

    for in_process, in_thread in asyncio.run(both()):
        assert in_process == in_thread
        assert in_process.is_over


def test_what_an_environment_declares_is_known_before_it_is_reset(pool: ProcessPool, subject: Any) -> None:
    for name in ("SqlAnalyst", "GuessNumber"):
        here, there = make(name), ProcessEnv(name, pool=pool)
        assert there.takes_messages == here.takes_messages
        assert list(there.tool_schemas) == list(here.tool_schemas)
        assert there.reward_range == here.reward_range
        assert list(there.policies) == list(here.policies)
        there.kill()
    assert ProcessEnv("GuessNumber", pool=pool).declared_isolation == "thread"
    assert ProcessEnv(subject.Talker, pool=pool).reward_range == (-float("inf"), float("inf"))


def test_a_reward_keeps_its_parts_and_none_stays_none(pool: ProcessPool, subject: Any) -> None:
    async def steps(session: EnvSession) -> Any:
        opening = await session.reset(5, {"level": 2})
        return (
            opening,
            await session.step(Message("assistant", "pid")),
            await session.step(Message("assistant", "rich")),
        )

    opening, first, last = run(lambda: ProcessEnv(subject.Subject, {"word": "w"}, pool=pool), steps)
    assert opening.messages == (Message("user", "w 5 {'level': 2}"),)
    assert opening.info == {"array": [0, 1]}
    assert (first.reward, first.reward_terms, first.success) == (None, {}, None)
    assert (last.messages, last.reward_terms, last.events) == ((), {"a": 0.1, "b": 0.2}, ("won",))
    assert last.reward == 0.30000000000000004  # 0.1 + 0.2 in binary floating point
    assert (last.terminated, last.truncated, last.success) == (True, False, True)


def test_players_play_where_the_hidden_state_is_with_the_randomness_that_they_are_given(
    pool: ProcessPool, subject: Any
) -> None:
    async def talk(session: EnvSession) -> Any:
        opening = (await session.reset(3)).messages
        reference = session.env.policies["reference"](session.env, np.random.default_rng(0))
        rewarded = await session.step(Message("assistant", await reference(opening)))
        rng = np.random.default_rng(7)
        rng.random()
        guesser = session.env.policies["random"](session.env, rng)
        said = [await guesser(opening), await guesser((*opening, *opening))]
        failing = session.env.policies["failing"](session.env, rng)
        with pytest.raises(EnvError, match=r"Talker: say\(\) raised RuntimeError: no idea .*in play: raise"):
            await failing(opening)
        return rewarded.reward, said

    reward, said = run(lambda: ProcessEnv(subject.Talker, pool=pool), talk)
    draws = np.random.default_rng(7).random(3)
    assert reward == 1.0
    assert said == [f"1 {draws[1].item()!r}", f"2 {draws[2].item()!r}"]


def test_a_function_that_makes_environments_will_do_as_well_as_a_class(pool: ProcessPool, subject: Any) -> None:
    [pid] = run(lambda: ProcessEnv(subject.build, {"word": "x"}, pool=pool), telling("pid"))
    assert pid != os.getpid()


# -- 2 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "kind", "text"),
    [
        (
            "raise",
            EnvError,
            r"step\(\) raised KeyError: 'as told' \(\w+/process_env_subject.py:\d+, in do_raise: raise",
        ),
        ("segfault", EnvError, r"^Subject: its worker process was killed by SIGSEGV in step\(\)$"),
        ("exit 3", EnvError, r"Subject: step\(\) raised SystemExit: 3"),
        (
            "big",
            ContractError,
            r"Subject: step\(\): an observation of 10,4\d\d,\d\d\d bytes, at most 4,194,304",
        ),
        ("eat 100000", EnvError, r"Subject: step\(\) raised MemoryError"),
        ("unknown", EnvError, r"AttributeError: 'Subject' object has no attribute 'do_unknown'"),
    ],
)
def test_what_goes_wrong_is_an_error_that_says_what(
    action: str, kind: type[Exception], text: str, pool: ProcessPool, subject: Any
) -> None:
    async def fail(session: EnvSession) -> None:
        await session.step(Message("assistant", action))

    with pytest.raises(kind, match=text):
        run(lambda: ProcessEnv(subject.Subject, pool=pool), fail)


def test_a_worker_survives_an_answer_that_is_too_long(pool: ProcessPool, subject: Any) -> None:
    async def go_on(session: EnvSession) -> Any:
        before = await tell(session, "pid")
        with pytest.raises(ContractError):
            await session.step(Message("assistant", "big"))
        return before, await tell(session, "pid")

    before, after = run(lambda: ProcessEnv(subject.Subject, pool=pool), go_on)
    assert before == after


def test_an_environment_whose_process_is_killed_while_it_is_looked_at_is_made_once_more(
    subject: Any, tmp_path: Path
) -> None:
    pool = ProcessPool()  # without workers that wait: one of those that dies is replaced, which is no attempt

    async def look(word: str) -> str:
        async with looking_at(lambda: ProcessEnv(subject.Subject, {"word": word}, pool=pool), "Subject") as env:
            return type(env).__name__

    assert asyncio.run(look(f"once {tmp_path / 'killed'}")) == "ProcessEnv"
    assert pool.counts["started"] == 2
    with pytest.raises(EnvDiedError, match="status 7 while the environment was made"):
        asyncio.run(look("crash"))
    assert pool.counts["started"] == 4
    pool.close()


def test_a_constructor_that_dies_or_hangs_is_the_episodes_failure(pool: ProcessPool, subject: Any) -> None:
    with pytest.raises(EnvError, match="its worker process exited with status 7 while the environment was made"):
        run(lambda: ProcessEnv(subject.Subject, {"word": "crash"}, pool=pool), telling())
    with pytest.raises(EnvTimeoutError, match=r"Subject: making the environment took longer than 0\.5 seconds"):
        run(
            lambda: ProcessEnv(subject.Subject, {"word": "hang"}, start_timeout_seconds=0.5, pool=pool),
            telling(),
        )
    with pytest.raises(EnvError, match=r"making the environment raised TypeError: .*unexpected keyword"):
        run(lambda: ProcessEnv(subject.Subject, {"words": "x"}, pool=pool), telling())
    with pytest.raises(EnvError, match="takes no argument 'hihg'; did you mean 'high'"):
        run(lambda: ProcessEnv("GuessNumber", {"hihg": 3}, pool=pool), telling())


def test_what_a_worker_cannot_import_or_be_sent_is_refused_with_the_way_out(pool: ProcessPool, subject: Any) -> None:
    class Local(TextEnv):
        pass

    for env, kwargs, text in (
        (Local, {}, "expected a class or function at the top of a module"),
        (lambda: None, {}, "expected a class or function at the top of a module"),
        (subject.Subject, {"word": {1, 2}}, r"arguments\['word'\]: expected text.*got set"),
    ):
        with pytest.raises(ConfigError, match=text) as caught:
            ProcessEnv(env, kwargs, pool=pool)
        assert 'set isolation to "thread"' in str(caught.value)


# -- 3 ----------------------------------------------------------------------------------------------------------------


def test_a_missed_deadline_kills_a_c_loop_and_what_the_environment_started(pool: ProcessPool, subject: Any) -> None:
    pids: list[int] = []

    async def hang(session: EnvSession) -> None:
        pids.extend([await tell(session, "pid"), await tell(session, "start"), await tell(session, "start new")])
        with pytest.raises(EnvTimeoutError, match=r"Subject: step\(\) did not answer within 1 seconds"):
            await session.step(Message("assistant", "loop"))

    killed = pool.counts["killed"]
    run(lambda: ProcessEnv(subject.Subject, pool=pool), hang, seconds=1.0)
    # The last has left the worker's process group, and could have outlived it.
    assert [is_gone(pid) for pid in pids] == [True, True, True]
    assert pool.counts["killed"] == killed + 1


def test_a_cancelled_call_kills_the_process_too(pool: ProcessPool, subject: Any) -> None:
    async def cancel(session: EnvSession) -> int:
        pid: int = await tell(session, "pid")
        step = asyncio.create_task(session.step(Message("assistant", "loop")))
        done, _ = await asyncio.wait({step}, timeout=0.05)
        assert not done
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        return pid

    assert is_gone(run(lambda: ProcessEnv(subject.Subject, pool=pool), cancel))


def test_an_instance_that_nobody_closes_takes_its_process_along(pool: ProcessPool, subject: Any) -> None:
    env = ProcessEnv(subject.Subject, pool=pool)
    assert env._worker is not None
    pid = env._worker.pid
    del env
    assert is_gone(pid)


# -- 4 ----------------------------------------------------------------------------------------------------------------


def test_a_worker_sees_no_secrets_inherits_nothing_and_has_limits(
    pool: ProcessPool, subject: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    monkeypatch.setenv("ALLOWED", "yes")
    limits = WorkerLimits(memory_mb=1000, variables=("ALLOWED", "NOT_SET"))
    with open(os.devnull, "rb") as held:
        os.set_inheritable(held.fileno(), True)
        [seen] = run(lambda: ProcessEnv(subject.Subject, limits=limits, pool=pool), telling("circumstances"))
    variables = seen["variables"]
    assert variables.pop("ALLOWED") == "yes"
    threads = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"}
    assert {variables[name] for name in threads} == {"1"}
    assert variables.pop("PYTHONHASHSEED") == "0"
    # LC_CTYPE is set by Python where there is no other locale, the last by Gymnasium.
    known = {"PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "HOME", "TMPDIR", "PYTHONPATH", "PYGAME_HIDE_SUPPORT_PROMPT"}
    assert set(variables) - threads <= known
    assert variables["HOME"] != os.environ.get("HOME")
    assert seen["folder"] == os.getcwd()  # paths in arguments mean what they mean here
    assert seen["limits"] == {"CORE": 0, "AS": 1000 * 2**20, "NOFILE": 1024}
    assert seen["leads"]
    assert seen["links"] == [os.devnull] * 3
    # Those three; the connection; the event loop's selector and its pair of sockets; the listing itself; one spare.
    assert seen["files"] <= 9


@pytest.mark.skipif(
    ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) < 1, reason="needs Landlock, Linux 5.13"
)
def test_a_worker_cannot_read_the_programs_variables_and_memory_through_proc(pool: ProcessPool, subject: Any) -> None:
    [found] = run(lambda: ProcessEnv(subject.Subject, pool=pool), telling(f"spy {os.getpid()}"))
    assert found == ["PermissionError"] * 3


def test_the_generators_of_the_whole_process_depend_on_the_episodes_seed_alone(pool: ProcessPool, subject: Any) -> None:
    async def draw(session: EnvSession) -> list[Any]:
        draws = []
        for seed in (1, 2, 1):
            await session.reset(seed)
            draws.append([await tell(session, "draw"), await tell(session, "draw")])
        return draws

    first, other, again = run(lambda: ProcessEnv(subject.Subject, pool=pool), draw)
    assert first == again
    assert len({value for episode in (first, other) for pair in episode for value in pair}) == 8


# -- 5 ----------------------------------------------------------------------------------------------------------------


def test_a_clean_worker_is_used_again_until_it_is_old(subject: Any, pool: ProcessPool) -> None:
    limits = WorkerLimits(max_episodes=3, memory_mb=4001)  # a kind of its own
    pids = [run(lambda: ProcessEnv(subject.Subject, limits=limits, pool=pool), telling("pid"))[0] for _ in range(4)]
    assert pids[0] == pids[1] == pids[2] != pids[3]
    assert is_gone(pids[0])


def test_a_worker_that_leaked_is_replaced_and_the_episode_counts(subject: Any, pool: ProcessPool) -> None:
    limits = WorkerLimits(max_growth_files=10, memory_mb=4002)
    replaced = pool.counts["replaced"]
    pid, held = run(lambda: ProcessEnv(subject.Subject, limits=limits, pool=pool), telling("pid", "leak"))
    assert held == 20
    next_pid, held = run(lambda: ProcessEnv(subject.Subject, limits=limits, pool=pool), telling("pid", "leak"))
    assert held == 20  # it starts from nothing again
    assert pid != next_pid
    assert pool.counts["replaced"] == replaced + 2


def test_a_process_that_was_started_and_left_is_a_leak(subject: Any, pool: ProcessPool) -> None:
    limits = WorkerLimits(memory_mb=4003)
    pid, child = run(lambda: ProcessEnv(subject.Subject, limits=limits, pool=pool), telling("pid", "start new"))
    assert is_gone(pid)
    assert is_gone(child)


def test_closing_twice_is_fine_and_nothing_else_follows(subject: Any, pool: ProcessPool) -> None:
    async def close_twice() -> None:
        env = ProcessEnv(subject.Subject, pool=pool)
        await env.close()
        await env.close()
        with pytest.raises(UsageError, match=r"Subject: step\(\) in a process that has ended; make a new environment"):
            await env.step("pid")

    asyncio.run(close_twice())


def test_a_hundred_play_at_once(pool: ProcessPool) -> None:
    async def episode(seed: int) -> Any:
        def player(env: Any, rng: np.random.Generator) -> Any:
            return env.policies["reference"](env, rng)

        return await play(
            lambda: ProcessEnv("GuessNumber", pool=pool),
            player,
            seed=seed,
            name="GuessNumber",
            max_turns=10,
            step_timeout_seconds=60,
        )

    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*map(episode, range(100)))

    episodes = asyncio.run(all_at_once())
    assert [episode.seed for episode in episodes] == list(range(100))
    assert {episode.episode_return for episode in episodes} == {1.0}


# -- 6 ----------------------------------------------------------------------------------------------------------------

PROGRAM = """
import asyncio, os, sys
from gspo_gym.env.core import TextEnv
from gspo_gym.env.workers.env import ProcessEnv

class Mine(TextEnv):
    def reset(self, *, seed=None, options=None):
        return str(os.getpid()), {}
    def step(self, action):
        sum(range(10**12))

async def main():
    env = ProcessEnv(Mine)
    messages, _ = await env.reset(seed=0)
    print(messages[0].content, flush=True)
    if sys.argv[1] == "hang":
        await env.step("go")

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["end", "hang"])
def test_workers_end_with_the_program_that_defines_its_environment_in_its_own_file(tmp_path: Path, how: str) -> None:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM), encoding="utf-8")
    with programs.Popen([sys.executable, str(path), how], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        worker = int(program.stdout.readline())
        if how == "hang":
            program.kill()  # it cannot clean up
        assert program.wait(timeout=60) == (-signal.SIGKILL if how == "hang" else 0)
    assert is_gone(worker)


class _KillsUsed(ProcessPool):
    """Kills a worker that was used before when it is given out, as if it had died with its host at that moment."""

    def lease(self, kind: tuple[Any, ...], *, memory_limit_mb: int) -> WorkerProcess:
        worker = super().lease(kind, memory_limit_mb=memory_limit_mb)
        if worker.num_episodes:
            os.kill(worker.pid, signal.SIGKILL)
        return worker


@pytest.mark.slow
def test_a_worker_that_died_while_it_waited_costs_no_attempt() -> None:
    pool = _KillsUsed()

    async def use_it_twice() -> None:
        for _ in range(2):
            env = ProcessEnv("GuessNumber", pool=pool)
            assert (await env.reset(seed=0))[0]
            await env.close()

    try:
        asyncio.run(use_it_twice())
        assert (pool.counts["started"], pool.counts["reused"], pool.counts["died"]) == (2, 1, 1)
    finally:
        pool.close()
