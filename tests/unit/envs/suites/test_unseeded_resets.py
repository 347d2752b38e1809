"""A reset without a seed stays on the side of the last seed that was given, and is a training task where none was.

One rule, `splits.next_seed`, asked of every interface that takes a seed which may be missing. The last test reads the
source: an interface that is added and not asked here fails it.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fastapi
import httpx
import numpy as np
import pytest
from gspo_gym_envs.suites import textarena
from gspo_gym_envs.suites import verifiers as verifiers_loading
from gspo_gym_envs.suites.discrete import DiscreteEnv
from gspo_gym_envs.suites.gem import GemEnv
from gspo_gym_envs.suites.nemo_gym import NeMoGymEnv
from gspo_gym_envs.suites.openenv import OpenEnvEnv
from gspo_gym_envs.suites.reasoning_gym import ReasoningGymEnv
from gspo_gym_envs.suites.skyrl_gym import SkyRLGymEnv
from gspo_gym_envs.suites.textarena import TextArenaEnv
from gspo_gym_envs.suites.verifiers import VerifiersEnv
from scripted_model import ScriptedModel, in_turn, text

from envs.code_repair.env import CodeRepair
from envs.code_repair.tasks import HELD_OUT
from envs.frozen_lake.env import FrozenLake
from envs.support_desk.env import SupportDesk
from envs.wordle.env import Wordle
from gspo_gym.base.settings import parse_seeds
from gspo_gym.cli.env import add_arguments
from gspo_gym.env.core import TextEnv
from gspo_gym.env.data.dataset import DatasetEnv
from gspo_gym.env.data.rows import content_hash, is_held_out_content
from gspo_gym.env.plain import as_gymnasium
from gspo_gym.env.tasks import TaskSource
from gspo_gym.env.vector import TextVectorEnv
from gspo_gym.policy.load import load_tokenizer
from gspo_gym.remote.serve.openenv_server import create_openenv_app
from gspo_gym.remote.serve.task_app_server import create_task_app
from gspo_gym.remote.serving import BackgroundServer
from gspo_gym.rollout.adapter import TokenObservationWrapper

FIRST = 2**31  # the first training seed
COUNT = 8  # unseeded episodes: that all fall on one side by chance happens once in 2**8
Sides = list[bool]  # of the unseeded episodes: whether each was held out
_ROOT = Path(__file__).parents[4]
_SUITES = ("reasoning_gym", "gem", "skyrl_gym", "omegaconf", "textarena", "nltk", "verifiers", "vf_counting")


class SaysSeed(TextEnv):
    """Its observation is the seed that reached it, and every answer ends the episode."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return f"seed {seed}", {}

    def step(self, action: str) -> Any:
        return "", 0.0, True, False, {}


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The other projects' packages are the stand-ins of this folder."""
    known = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in _SUITES}
    for name in known:
        del sys.modules[name]
    for folder in ("fake_suites", "fake_textarena", "fake_verifiers"):
        monkeypatch.syspath_prepend(str(Path(__file__).parent / folder))
    textarena.fewest_players.cache_clear()
    verifiers_loading.forget_loaded()
    yield
    textarena.fewest_players.cache_clear()
    verifiers_loading.forget_loaded()
    for name in [name for name in sys.modules if name.partition(".")[0] in _SUITES]:
        del sys.modules[name]
    sys.modules.update(known)


def side(observation: Any) -> bool:
    return int(str(observation).removeprefix("seed ")) < FIRST


def reset_often(env: Any, first: int | None, look: Callable[[Any, Any], bool]) -> Sides:
    """Resets an environment with the seed, if there is one, then without; `look` tells the side of an episode."""

    async def answer(**given: Any) -> Any:
        answered = env.reset(**given)
        return await answered if asyncio.iscoroutine(answered) else answered

    async def played() -> Sides:
        if first is not None:
            await answer(seed=first)
        sides = [look(env, await answer()) for _ in range(COUNT)]
        closed = env.close()
        if asyncio.iscoroutine(closed):
            await closed
        return sides

    return asyncio.run(played())


def like_the_drawn_seed(make: Callable[[], Any], first: int | None) -> Sides:
    """Where an episode does not tell its side: it is the one that a fresh environment plays under the drawn seed.

    What is drawn is said here again: below 2**31, from the generator that Gymnasium makes of the last seed.
    """
    env, rng = make(), np.random.default_rng(FIRST + 99 if first is None else first)
    if first is None:
        env.np_random = np.random.default_rng(FIRST + 99)  # Gymnasium would draw it from the operating system
    else:
        env.reset(seed=first)
    sides = []
    for _ in range(COUNT):
        drawn = int(rng.integers(FIRST))
        played = told(env, env.reset())
        matches = [told(fresh := make(), fresh.reset(seed=seed)) == played for seed in (drawn, FIRST + drawn)]
        assert sum(matches) == 1, f"neither or both of the seeds {drawn} and {FIRST + drawn} play like that"
        sides.append(matches[0])
    return sides


def told(env: Any, answer: Any) -> Any:
    """The observation, and what the game has hidden."""
    if isinstance(env, GemEnv):
        return answer[0], env.inner.game_number
    if isinstance(env, TextArenaEnv):
        return answer[0], env._match._game.number, str(vars(env._match._generators))
    return answer[0]


def plain(first: int | None) -> Sides:
    with as_gymnasium(SaysSeed) as env:
        return reset_often(env, first, lambda _env, answer: side(answer[0]))


def vector(first: int | None) -> Sides:
    """Autoreset and `reset()` alike."""
    envs = TextVectorEnv(SaysSeed, 2, env_id="SaysSeed")
    if first is not None:
        envs.reset(seed=first)
    sides = [side(text) for text in envs.reset()[0]]
    for _ in range(COUNT // 2):
        envs.step(["end", "end"])
        sides += [side(text) for text in envs.step(["", ""])[0]]
    envs.close()
    return sides


def tokens(first: int | None) -> Sides:
    tokenizer = load_tokenizer("tiny:qwen3-64")
    with TokenObservationWrapper(SaysSeed(), tokenizer, 3, 0, max_model_len=500, max_output_tokens=8) as wrapper:
        if first is not None:
            wrapper.reset(first)
        return [wrapper.reset()[1]["seed"] < FIRST for _ in range(COUNT)]


def served_openenv(first: int | None) -> Sides:
    """One session: `websockets` speaks to the server as any OpenEnv client does."""
    from websockets.sync.client import connect

    with (
        BackgroundServer(create_openenv_app(SaysSeed, isolation="thread")) as server,
        connect(server.url.replace("http", "ws", 1) + "/ws", proxy=None) as socket,
    ):
        told = []
        for seed in [*([] if first is None else [first]), *[None] * COUNT]:
            socket.send(f'{{"type": "reset", "data": {{{"" if seed is None else f"{chr(34)}seed{chr(34)}: {seed}"}}}}}')
            told.append(str(socket.recv()))
    return [int(answer.partition("seed ")[2].partition('"')[0]) < FIRST for answer in told[-COUNT:]]


def served_rollouts(first: int | None, mode: str = "rl") -> Sides:
    """Every rollout is a session of its own."""
    assert first is None
    model = ScriptedModel(in_turn(*[text("done")] * COUNT))
    with ExitStack() as stack:
        app = stack.enter_context(BackgroundServer(create_task_app(SaysSeed, isolation="thread")))
        url = stack.enter_context(BackgroundServer(model)).url + "/t/id/v1/chat/completions?cid=id"
        for number in range(COUNT):
            policy = {"policy_name": "p", "config": {"model": "m", "inference_url": url}}
            request = {"run_id": f"run-{number}", "env": {}, "policy": policy, "ops": ["agent", "env"], "mode": mode}
            answer = httpx.post(f"{app.url}/rollout", json=request, trust_env=False, timeout=30)
            assert answer.status_code == 200, answer.text
    return [side(asked.body["messages"][-1]["content"]) for asked in model.asked]


def served_to_ours(make: Callable[[str], Any], app: Any, first: int | None) -> Sides:
    with BackgroundServer(app) as server:
        return reset_often(make(server.url), first, lambda _env, answer: side(messages_text(answer[0])))


def messages_text(observation: Any) -> str:
    if isinstance(observation, str):
        return observation
    last = observation[-1]
    return str(last["content"] if isinstance(last, Mapping) else last.content)


def rows(env: Any, answer: Any) -> bool:
    held_out = {row.where for row in env.questions.held_out}
    return answer[1]["row"] in held_out


def question(_env: Any, answer: Any) -> bool:
    return is_held_out_content(content_hash(answer[0][-1].content, 0), 0.1)


class NemoServer:
    """Opens sessions, and nothing more."""

    def __init__(self) -> None:
        self.app = fastapi.FastAPI()
        self.app.add_api_route("/seed_session", self.begin, methods=["POST"])

    async def begin(self, response: fastapi.Response) -> dict[str, Any]:
        response.set_cookie("session", "mine")
        return {}


def nemo(first: int | None) -> Sides:
    asked = [{"responses_create_params": {"input": f"Row {number}."}} for number in range(6)]
    with BackgroundServer(NemoServer().app) as server:
        env = NeMoGymEnv(url=server.url, rows=asked, held_out=asked[:2])
        shown = ("Row 0.", "Row 1.")
        return reset_often(env, first, lambda _env, answer: answer[0][-1].content in shown)


def task_source(first: int | None) -> Sides:
    source = TaskSource([f"task {number}" for number in range(20)], held_out=["task 0", "task 1"])
    rng = np.random.default_rng(first)
    return [source.task(None, rng) in ("task 0", "task 1") for _ in range(COUNT)]


def dataset(first: int | None) -> Sides:
    env = DatasetEnv([{"question": f"{n}?", "answer": str(n)} for n in range(60)], held_out_fraction=0.3)
    return reset_often(env, first, rows)


def skyrl(first: int | None) -> Sides:
    asked = [{"prompt": [{"role": "user", "content": f"{n}?"}], "reward_spec": {}} for n in range(60)]
    return reset_often(SkyRLGymEnv("gsm8k", asked, held_out_fraction=0.3), first, rows)


def verifiers(first: int | None) -> Sides:
    env = VerifiersEnv(env_id="vf-counting", env_args={"has_eval": True})
    return reset_often(env, first, lambda _env, answer: answer[1]["is_held_out"])


def frozen_lake(first: int | None) -> Sides:
    """The map is that of the drawn seed; before it two numbers were drawn, of which one is the ice's."""

    def maps(seed: int) -> Any:
        env = FrozenLake(style="terse", map="random", size=8)
        env.reset(seed=seed)
        return env.lake

    env, rng = (
        FrozenLake(style="terse", map="random", size=8),
        np.random.default_rng(FIRST + 99 if first is None else first),
    )
    if first is None:
        env.np_random = np.random.default_rng(FIRST + 99)
    else:
        env.reset(seed=first)
        rng.integers(FIRST, size=2)
    sides = []
    for _ in range(COUNT):
        env.reset()
        rng.integers(FIRST, size=2)
        drawn = int(rng.integers(FIRST))
        assert env.lake in (maps(drawn), maps(FIRST + drawn))
        sides.append(env.lake == maps(drawn))
    return sides


def wordle(first: int | None) -> Sides:
    env = Wordle(style="terse")
    held_out = {env.words.tasks.task(seed) for seed in range(1000)}
    return reset_often(env, first, lambda env, _answer: env._hidden in held_out)


def code_repair(first: int | None) -> Sides:
    return reset_often(CodeRepair(style="terse"), first, lambda env, _answer: env.task.name in HELD_OUT)


def customer(env: SupportDesk) -> str:
    assert env._shop is not None
    return str(env._shop._rows("SELECT name FROM customers", ())[0][0])


def support_desk(first: int | None) -> Sides:
    """The surnames of the customers of both sides differ (`shop.py`)."""
    surnames = ("Iwata", "Jensen", "Kowal", "Lopez", "Moreau", "Novak", "Okoye", "Petrov")
    return reset_often(SupportDesk(), first, lambda env, _answer: customer(env).split()[-1] in surnames)


PROBES: Mapping[str, Callable[[int | None], Sides]] = {
    "as_gymnasium": plain,
    "make_vec": vector,
    "TokenObservationWrapper": tokens,
    "OpenEnv server": served_openenv,
    "OpenEnv client": lambda first: served_to_ours(
        lambda url: OpenEnvEnv(url=url), create_openenv_app(SaysSeed, isolation="thread"), first
    ),
    "NeMoGym": nemo,
    "TaskSource": task_source,
    "Dataset": dataset,
    "SkyRLGym": skyrl,
    "ReasoningGym": lambda first: reset_often(ReasoningGymEnv("sum"), first, question),
    "Verifiers": verifiers,
    "Gem": lambda first: like_the_drawn_seed(lambda: GemEnv("game:GuessTheNumber-v0-easy", most=10**6), first),
    "TextArena": lambda first: like_the_drawn_seed(lambda: TextArenaEnv(game="Guess-v0"), first),
    "Discrete": lambda first: like_the_drawn_seed(lambda: DiscreteEnv("CartPole-v1"), first),
    "FrozenLake": frozen_lake,
    "Wordle": wordle,
    "CodeRepair": code_repair,
    "SupportDesk": support_desk,
}
# Those whose every unseeded request is a session of its own.
STATELESS: Mapping[str, Callable[[int | None], Sides]] = {"task app rollout": served_rollouts}


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("interface", PROBES)
@pytest.mark.parametrize("first", [5, FIRST + 5, None])
def test_an_unseeded_episode_is_on_the_side_of_the_last_seed(interface: str, first: int | None) -> None:
    sides = PROBES[interface](first)
    assert len(sides) >= COUNT
    assert set(sides) == {first is not None and first < FIRST}


@pytest.mark.parametrize("interface", STATELESS)
def test_an_unseeded_session_is_a_training_task(interface: str) -> None:
    assert set(STATELESS[interface](None)) == {False}


def test_an_unseeded_rollout_of_an_evaluation_is_held_out() -> None:
    assert set(served_rollouts(None, mode="eval")) == {True}


def test_episodes_are_collected_of_training_tasks_unless_other_seeds_are_named() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args(["collect", "GuessNumber", "--policy", "scripted:random", "--out", "x.jsonl"])
    seeds = parse_seeds(arguments.seeds)
    assert len(seeds) == 100
    assert min(seeds) >= FIRST


# Every function and field of these rooms with a seed that may be missing, by file and name: the probe that asks it, or
# why there is nothing to ask.
_NO_SIDES = "none of its tasks is held out: they are drawn from np_random alone"
INTERFACES: Mapping[str, str] = {
    "gspo_gym/env/plain.py PlainEnv.reset": "as_gymnasium",
    "gspo_gym/env/vector.py TextVectorEnv.reset": "make_vec",
    "gspo_gym/env/vector.py TextVectorEnv._seeds_from": "make_vec",
    "gspo_gym/env/vector.py TextVectorEnv._begin": "make_vec",
    "gspo_gym/env/tasks.py TaskSource.task": "TaskSource",
    "gspo_gym/env/data/dataset.py DatasetEnv.reset": "Dataset",
    "gspo_gym/env/core.py ToolEnv.reset": "CodeRepair",
    "gspo_gym/env/core.py ToolEnv.reset_seed": "CodeRepair",
    "gspo_gym/env/chat_model.py ChatModel.reply": "of sampling, not of a task",
    "envs/suites/discrete.py DiscreteEnv.reset": "Discrete",
    "envs/suites/gem.py GemEnv.reset": "Gem",
    "envs/suites/nemo_gym.py NeMoGymEnv.reset": "NeMoGym",
    "envs/suites/openenv.py OpenEnvEnv.reset": "OpenEnv client",
    "envs/suites/reasoning_gym.py ReasoningGymEnv.reset": "ReasoningGym",
    "envs/suites/skyrl_gym.py SkyRLGymEnv.reset": "SkyRLGym",
    "envs/suites/textarena.py TextArenaEnv.reset": "TextArena",
    "envs/suites/verifiers.py VerifiersEnv.reset": "Verifiers",
    "gspo_gym/rollout/adapter.py TokenObservationWrapper.reset": "TokenObservationWrapper",
    "gspo_gym/rollout/adapter.py TokenObservationWrapper.reset_async": "TokenObservationWrapper",
    "gspo_gym/rollout/statistics.py bootstrap_mean_interval": "of sampling, not of a task",
    "gspo_gym/remote/apps/check.py CheckSettings.seed": "of sampling, not of a task",
    "gspo_gym/remote/apps/contracts.py RolloutEnv.seed": "task app rollout",
    "gspo_gym/remote/serve/env_source.py EnvSource.seed_of": "task app rollout",
    "gspo_gym/remote/serve/env_source.py addressed_seed": "task app rollout",
    "gspo_gym/remote/serve/openenv_sessions.py Session.reset": "OpenEnv server",
    "gspo_gym/remote/serve/openenv_wire.py ResetRequest.seed": "OpenEnv server",
    "envs/countdown/env.py Countdown.reset": "TaskSource",
    "envs/frozen_lake/env.py FrozenLake.reset": "FrozenLake",
    "envs/guess_number/env.py GuessNumber.reset": _NO_SIDES,
    "envs/homestead/env.py Homestead.reset": _NO_SIDES,
    "envs/tic_tac_toe/env.py TicTacToe.reset": _NO_SIDES,
    "envs/wordle/env.py Wordle.reset": "Wordle",
}


def test_every_interface_that_takes_no_seed_is_asked_here() -> None:
    files = [path for room in ("gspo_gym/env", "gspo_gym/rollout", "gspo_gym/remote", "envs") for path in _python(room)]
    found = {f"{path} {name}" for path in files for name in _optional_seeds(ast.parse((_ROOT / path).read_text()))}
    assert found == set(INTERFACES)
    asked = {*PROBES, *STATELESS}
    assert {why for why in INTERFACES.values() if why not in asked} == {_NO_SIDES, "of sampling, not of a task"}


def _python(room: str) -> list[str]:
    return [path.relative_to(_ROOT).as_posix() for path in sorted((_ROOT / room).rglob("*.py"))]


def _optional_seeds(tree: ast.AST, inside: str = "") -> Iterator[str]:
    """Names of functions with an argument, and of classes with a field, `seed` that may be left out or None."""
    for node in ast.iter_child_nodes(tree):
        name = f"{inside}{getattr(node, 'name', '')}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if any(_may_be_missing(argument, default) for argument, default in _arguments(node.args)):
                yield name
            yield from _optional_seeds(node, f"{name}.")
        elif isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    argument = ast.arg(field.target.id, field.annotation)
                    if _may_be_missing(argument, field.value):
                        yield f"{name}.{field.target.id}"
            yield from _optional_seeds(node, f"{name}.")


def _arguments(given: ast.arguments) -> Sequence[tuple[ast.arg, ast.expr | None]]:
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    return [*zip(positional, defaults, strict=True), *zip(given.kwonlyargs, given.kw_defaults, strict=True)]


def _may_be_missing(argument: ast.arg, default: ast.expr | None) -> bool:
    annotation = "" if argument.annotation is None else ast.unparse(argument.annotation)
    return argument.arg in ("seed", "reset_seed") and (default is not None or "None" in annotation)
