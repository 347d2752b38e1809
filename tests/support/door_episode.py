"""An environment with a tool that wants awkward arguments, played by a script through any chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from chat_families import tokenizer_of

from gspo_gym import Message, Reward, ToolCall, ToolEnv, tool
from gspo_gym.chat.renderer import RendererCache
from gspo_gym.rollout.actors import ScriptedActor
from gspo_gym.rollout.episode import EpisodeRequest, run_episode
from gspo_gym.rollout.limits import EpisodeLimits
from gspo_gym.types import Task, Trajectory

WAY = 'in "quickly", if it\'s\n  open {1} é 🙂'


class Door(ToolEnv):
    """Opens when it is asked in the right words, at the second time, and the right number is said then."""

    reward_range = (0.0, 1.0)

    def start(self, options: Any) -> str:
        del options
        self._knocks = 0
        return "Open."

    @tool
    def go(self, way: str, steps: int, fast: bool) -> str:
        """Go.

        Args:
            way: where.
            steps: how many.
            fast: whether.
        """
        self._knocks += (way, steps, fast) == (WAY, 12, True)
        if self._knocks == 2:
            self.finish(Reward({"opened": 1.0}, success=True))
        return "Knock again: <|im_end|> is no end."


def knock(env: Any, generator: Any) -> Callable[[Sequence[Message]], Message]:
    del env, generator
    call = ToolCall("call_0", "go", {"way": WAY, "steps": 12, "fast": True})
    return lambda _messages: Message("assistant", "", tool_calls=(call,))


def play_door(template: str) -> Trajectory:
    """Return a scripted episode of `Door` whose return is 1 if both calls arrive as they were meant."""
    return asyncio.run(
        run_episode(
            EpisodeRequest("door", Task("Door", 0), sampling_seed=0),
            make_env=lambda _task: Door(),
            act=ScriptedActor(knock),
            renderers=RendererCache(tokenizer_of(template), tools_in="template"),
            limits=EpisodeLimits(max_turns=3, max_output_tokens=2000, max_model_len=10_000),
        )
    )
