"""An engine that does not sample what the learner thinks is found out by the first batch it touches.

Real engines on tiny models, each spoilt in one way, in a real loop: pool, learner, weight sync, trainer, recorder. The
engines share the learner's weights or hold a copy that nobody asks for a canary: only the alarm can see anything. What
is wrong from the start must sound at step 1, what an update spoils at step 2; and a sound run never sounds.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo_gym.chat.renderer import RendererCache
from gspo_gym.diagnosis.alarms import MismatchAlarm
from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.env.rewards import Reward
from gspo_gym.errors import EngineMismatchError
from gspo_gym.learning.settings import LoraSettings, LossSettings, OptimizerSettings, UpdateSettings
from gspo_gym.learning.update import Learner
from gspo_gym.policy.load import Policy, adapt_policy, load_policy
from gspo_gym.policy.weight_sync import WeightSync
from gspo_gym.rollout.actors import EngineActor
from gspo_gym.rollout.episode import episode_player
from gspo_gym.rollout.evaluation import Evaluation, EvaluationRow
from gspo_gym.rollout.limits import EpisodeLimits, PoolLimits
from gspo_gym.rollout.pool import RolloutPool
from gspo_gym.run.collect import Collector
from gspo_gym.run.journal import Journal
from gspo_gym.run.recording import RunRecorder
from gspo_gym.run.records import read_events
from gspo_gym.run.report.progress import QuietProgress
from gspo_gym.run.settings import EvaluationSettings, RunSize, TrainPlan
from gspo_gym.run.state import Saver
from gspo_gym.run.trainer import Trainer
from gspo_gym.types import Completion, Outcome

TINY = "tiny:qwen3-64"
GROUPS, GROUP_SIZE = 2, 4


class Letters:
    """Two turns, each worth the mean byte of what is said: no two random replies earn the same."""

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.num_said = 0
        return "letters", {}

    async def step(self, action: str) -> Any:
        self.num_said += 1
        worth = sum(action.encode()) / (256 * max(len(action.encode()), 1))
        return "and", Reward({"letters": worth}), self.num_said == 2, False, {}

    async def close(self) -> None:
        pass


class Resampling(LocalEngine):
    """Applies sampling parameters of its own, as a server does with defaults nobody told it to drop."""

    changes: dict[str, Any] = {}

    async def generate(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, **kwargs: Any) -> Completion:
        return await super().generate(prompt_token_ids, replace(sampling, **self.changes), **kwargs)


class Hoarding(LocalEngine):
    """Keeps keys and values over updates, and finds them again by place: eight episodes at once, as in a cache."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.places: dict[str, str] = {}
        self.next_place = itertools.cycle(range(GROUPS * GROUP_SIZE))

    async def generate(self, *args: Any, session_id: str | None = None, **kwargs: Any) -> Completion:
        assert session_id is not None
        if session_id not in self.places:
            self.places[session_id] = f"place-{next(self.next_place)}"
        return await super().generate(*args, session_id=self.places[session_id], **kwargs)

    async def end_session(self, session_id: str) -> None:
        pass

    def _take(self, batch: Any, update: Any) -> None:
        batch.shared.accept_weights()
        batch.weight_version = update.version


class Deaf(LocalEngine):
    """Takes the version of an update and not its weights."""

    def _take(self, batch: Any, update: Any) -> None:
        batch.update_weights(update.version)


def resampling(**changes: Any) -> Callable[[Policy], LocalEngine]:
    def make(policy: Policy) -> LocalEngine:
        engine = Resampling(policy.model, max_model_len=128)
        engine.changes = changes
        return engine

    return make


def with_noise_in_adapter(model: Any) -> Any:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.05)
    return other


# The engine, and the first step whose batch it spoils.
CAUSES: dict[str, tuple[Callable[[Policy], LocalEngine], int]] = {
    "stale keys and values": (lambda policy: Hoarding(policy.model, max_model_len=128), 2),
    "wrong temperature": (resampling(temperature=0.9), 1),
    "wrong dtype": (lambda policy: LocalEngine(copy.deepcopy(policy.model).to(torch.bfloat16), max_model_len=128), 1),
    "wrong adapter": (lambda policy: LocalEngine(with_noise_in_adapter(policy.model), max_model_len=128), 1),
    "skipped update": (lambda policy: Deaf(copy.deepcopy(policy.model), max_model_len=128), 2),
    "truncated sampling": (resampling(top_p=0.9), 1),
    "silent top-k": (resampling(top_k=20), 1),
}


def train(folder: Path, make_engine: Callable[[Policy], LocalEngine], *, num_steps: int, patience: int = 10**6) -> Any:
    """Steps at which the alarm sounded."""
    policy = adapt_policy(load_policy(TINY, seed=1), LoraSettings(r=4, alpha=8), seed=0)
    recorder = RunRecorder.create(folder, "")

    async def evaluate(label: str) -> Evaluation:
        return Evaluation("test/Letters-v0", (EvaluationRow(0, 1.0, None, 1, Outcome.TERMINATED),))

    async def main() -> None:
        engine = make_engine(policy)
        pool = RolloutPool(
            play=episode_player(
                make_env=lambda task: Letters(),
                act=EngineActor(engine),
                renderers=RendererCache(policy.tokenizer),
                limits=EpisodeLimits(max_turns=4, max_output_tokens=6, max_model_len=128),
            ),
            pool_limits=PoolLimits(max_concurrent_rollouts=8, max_attempts=1, min_group_fraction=0.75),
            run_seed=7,
        )
        learner = Learner(
            policy.model, optimizer=OptimizerSettings(), loss=LossSettings(), update=UpdateSettings(learning_rate=1e-3)
        )
        num_episodes = GROUPS * GROUP_SIZE
        plan = TrainPlan(
            env_id="test/Letters-v0",
            size=RunSize(1, num_steps, num_episodes, batch_size=num_episodes, group_size=GROUP_SIZE),
            evaluation=EvaluationSettings(every_n_iters=1000),
        )
        sync = WeightSync(engine)
        trainer = Trainer(
            plan,
            collector=Collector(plan, pool, is_committed=sync.is_committed),
            learner=learner,
            publish=sync.after_step,
            evaluate=evaluate,
            saver=Saver(lambda state: Path, plan.loop, on_event=recorder.event),
            journal=Journal(plan, recorder, QuietProgress(lambda text: None), alarm=MismatchAlarm(patience=patience)),
        )
        try:
            await trainer.run()
        finally:
            await engine.close()
            recorder.close()

    asyncio.run(main())
    return [event["step"] for event in read_events(folder) if event["kind"] == "mismatch"]


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_is_found_by_the_first_batch_that_it_touches(cause: str, tmp_path: Path) -> None:
    make_engine, first = CAUSES[cause]
    assert train(tmp_path, make_engine, num_steps=2) == list(range(first, 3))


@pytest.mark.slow
def test_twenty_sound_steps_sound_no_alarm(tmp_path: Path) -> None:
    assert train(tmp_path, lambda policy: LocalEngine(policy.model, max_model_len=128), num_steps=20) == []


@pytest.mark.slow
def test_a_sound_engine_with_a_copy_of_its_own_sounds_no_alarm(tmp_path: Path) -> None:
    def make(policy: Policy) -> LocalEngine:
        return LocalEngine(copy.deepcopy(policy.model), source=policy.model, max_model_len=128)

    assert train(tmp_path, make, num_steps=20) == []


def test_a_run_ends_when_the_engine_disagrees_batch_after_batch(tmp_path: Path) -> None:
    make_engine, _ = CAUSES["wrong temperature"]
    with pytest.raises(EngineMismatchError, match="in 3 batches in a row"):
        train(tmp_path, make_engine, num_steps=20, patience=2)
    assert [event["step"] for event in read_events(tmp_path) if event["kind"] == "mismatch"] == [1, 2]
