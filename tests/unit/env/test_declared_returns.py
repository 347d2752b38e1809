"""A return outside `reward_range`, or a sum that overflows, is refused as NaN is: whoever plays the environment."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import pytest

from gspo_gym.chat.renderer import RendererCache
from gspo_gym.engine.scripted import ScriptedEngine
from gspo_gym.env.session import EnvSession
from gspo_gym.env.vector import TextVectorEnv
from gspo_gym.env.workers.env import ProcessEnv
from gspo_gym.errors import ContractError
from gspo_gym.policy.tiny import tiny_tokenizer
from gspo_gym.rollout.actors import EngineActor
from gspo_gym.rollout.adapter import TokenObservationWrapper
from gspo_gym.rollout.episode import EpisodeRequest, run_episode
from gspo_gym.rollout.limits import EpisodeLimits
from gspo_gym.types import Message, Outcome, Task

SOURCE = '''
from gspo_gym.env.core import TextEnv

class Paying(TextEnv):
    """Pays what it is told to: one number a turn, and ends with the last."""

    def __init__(self, rewards=(), reward_range=(0.0, 1.0), ends=True):
        self.rewards, self.ends = list(rewards), ends
        self.reward_range = tuple(reward_range)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = list(self.rewards)
        return "How much?", {}

    def step(self, action):
        reward = self.left.pop(0)
        return "More?", reward, self.ends and not self.left, False, {}
'''
TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def paying(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    folder = tmp_path_factory.mktemp("module")
    (folder / "paying_module.py").write_text(SOURCE)
    sys.path.insert(0, str(folder))
    import paying_module

    return paying_module.Paying


def play_session(make: Callable[[], Any], num_turns: int) -> list[float | None]:
    async def play() -> list[float | None]:
        session = EnvSession(make(), env_id="Paying")
        await session.reset(0)
        return [(await session.step(Message("assistant", "1"))).reward for _ in range(num_turns)]

    return asyncio.run(play())


def play_tokens(make: Callable[[], Any], num_turns: int) -> list[float | None]:
    with TokenObservationWrapper(make(), TOKENIZER, num_turns + 1, 0, 512, 16, env_id="Paying") as env:
        env.reset(0)
        return [env.step([49, TOKENIZER.eos_token_id])[1] for _ in range(num_turns)]


def play_vector(make: Callable[[], Any], num_turns: int) -> list[float | None]:
    envs = TextVectorEnv(make, 1, env_id="Paying")
    try:
        envs.reset(seed=0)
        rewards: list[float | None] = []
        for _ in range(num_turns):
            _, (reward,), _, (truncated,), infos = envs.step(["1"])
            if truncated:  # with reward NaN
                raise ContractError(infos["error"][0])
            rewards.append(float(reward))
        return rewards
    finally:
        envs.close()


INTERFACES = {"session": play_session, "tokens": play_tokens, "vector": play_vector}


@pytest.mark.parametrize("play", INTERFACES.values(), ids=INTERFACES)
@pytest.mark.parametrize(
    ("rewards", "reward_range", "message"),
    [
        ([0.5, 0.6], (0.0, 1.0), r"gave reward 0.6, with which the episode's return is 1.1; expected it in .*\(0, 1\)"),
        ([5.0], (0.0, 1.0), "gave reward 5"),
        ([-0.1, 0.1], (0.0, 1.0), "return is -0.1"),
        ([0.2, 0.2], (0.5, 1.0), "return is 0.4"),  # it ended, so 0 is none of its returns any more
        ([1e308, 1e308], (-math.inf, math.inf), "the sum of the episode's rewards overflows"),
        ([math.nan], (-math.inf, math.inf), "nan"),
        ([10**400], (-math.inf, math.inf), "expected a finite reward, got int 10000"),
        ([10**5000], (-math.inf, math.inf), "expected a finite reward, got int"),  # more digits than Python writes
        ([1.0], (0.0, 10**400), r"expected reward_range to be \(smallest, largest return\)"),
        ([1.0], (1.0, 0.0), r"expected reward_range to be \(smallest, largest return\)"),
    ],
)
def test_a_return_that_cannot_be_is_refused_by_every_interface(
    play: Callable[..., Any], paying: Any, rewards: list[float], reward_range: Sequence[float], message: str
) -> None:
    with pytest.raises(ContractError, match=message):
        play(lambda: paying(rewards, reward_range), len(rewards))


@pytest.mark.parametrize(
    ("rewards", "reward_range"),
    [
        ([0.5, 0.5], (0.0, 1.0)),
        ([0.1] * 10, (0.0, 1.0)),
        ([1.0 + 1e-7], (0.0, 1.0)),  # 1 in float32
        ([-1.0] * 14, (-20.0, -13.0)),  # on the way -1 is above every return of a whole episode
        ([1e300, -1e300], (-math.inf, math.inf)),
        ([1e6 + 0.5], (0.0, 1e6)),  # within a millionth of the bound
    ],
)
def test_returns_within_the_range_are_answered(
    paying: Any, rewards: list[float], reward_range: Sequence[float]
) -> None:
    assert play_session(lambda: paying(rewards, reward_range), len(rewards)) == rewards


def test_every_episode_starts_from_nothing(paying: Any) -> None:
    async def play() -> None:
        session = EnvSession(paying([1.0]), env_id="Paying")
        for _ in range(3):
            await session.reset(0)
            assert (await session.step(Message("assistant", "1"))).reward == 1.0

    asyncio.run(play())


def test_an_environment_in_a_worker_process_is_held_to_its_range(paying: Any) -> None:
    async def play() -> None:
        session = EnvSession(ProcessEnv(paying, {"rewards": [0.5, 7.0]}), env_id="Paying")
        try:
            await session.reset(0)
            assert (await session.step(Message("assistant", "1"))).reward == 0.5
            with pytest.raises(
                ContractError, match=r"return is 7.5; expected it in the declared reward_range, \(0, 1\)"
            ):
                await session.step(Message("assistant", "1"))
        finally:
            await session.close()

    asyncio.run(play())


class Doubled(gymnasium.RewardWrapper[Any, Any]):
    """Changes rewards, and says nothing of their range."""

    def reward(self, reward: Any) -> Any:
        return 2 * float(reward)


def test_a_wrapper_that_changes_rewards_is_not_held_to_the_range_below_it(paying: Any) -> None:
    assert play_session(lambda: Doubled(paying([1.0])), 1) == [2.0]
    limited = gymnasium.wrappers.TimeLimit(paying([2.0]), 5)
    with pytest.raises(ContractError, match="gave reward 2"):
        play_session(lambda: gymnasium.wrappers.OrderEnforcing(limited), 1)


@pytest.mark.parametrize(("rewards", "kept"), [([0.25, 9.0], [0.25, None]), ([1e308, 1e308], [1e308, None])])
def test_such_an_episode_is_an_environment_error_and_its_reward_is_not_recorded(
    paying: Any, rewards: list[float], kept: list[float | None]
) -> None:
    reward_range = (0.0, 1.0) if rewards[0] < 1 else (0.0, math.inf)
    end = [49, TOKENIZER.eos_token_id]
    episode = asyncio.run(
        run_episode(
            EpisodeRequest("g0/0", Task("Paying", 0), sampling_seed=11),
            make_env=lambda task: paying(rewards, reward_range, ends=False),
            act=EngineActor(ScriptedEngine([end, end])),
            renderers=RendererCache(TOKENIZER),
            limits=EpisodeLimits(max_turns=2, max_output_tokens=16, max_model_len=512, step_timeout_seconds=5.0),
        )
    )
    assert episode.outcome is Outcome.ENV_ERROR
    assert [turn.reward for turn in episode.turns] == kept
    assert not episode.is_scored
