"""The checks of a page's data: bugs planted where a run's data are made, and the finding that names each."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gspo_gym_envs.guess_number.env import GuessNumber
from tiers import slow_but

from gspo_gym.cli.main import main
from gspo_gym.cli.train import run_training
from gspo_gym.config.run_config import RunConfig
from gspo_gym.diagnosis import tokens
from gspo_gym.diagnosis.tokens import page_findings, rewards_follow_the_turn_before, terms_are_others
from gspo_gym.diagnosis.view import Finding, StepView
from gspo_gym.engine.local.shared_model import SharedModel
from gspo_gym.judge import records as scorer
from gspo_gym.judge.server import create_fake_judge_app
from gspo_gym.learning import batching, losses, update
from gspo_gym.learning.batching import TokenBatch
from gspo_gym.learning.losses import Denominators
from gspo_gym.learning.tokens import Fate
from gspo_gym.learning.update import Learner
from gspo_gym.policy.tiny import tiny_tokenizer
from gspo_gym.remote.serving import BackgroundServer
from gspo_gym.rollout import episode, pool, record
from gspo_gym.rollout.actors import EngineActor
from gspo_gym.run import collect
from gspo_gym.run.report.page_data import run_values, step_values
from gspo_gym.run.tokens import open_tokens, pack_columns, token_path
from gspo_gym.types import Completion, Outcome, Sampling, StepResult, Trajectory

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with BackgroundServer(create_fake_judge_app()) as server:
        yield f"{server.url}/v1"


def config_of(folder: Path, label: str, changes: dict[str, Any]) -> RunConfig:
    """Two steps of four groups: clipping, a KL term, two passes over two minibatches, several turns."""
    values: dict[str, dict[str, Any]] = {
        "run": {"folder": str(folder), "log_tokens_every_n_iters": 1},
        "algorithm": {"variety": "gspo_token"},
        "model": {"label": label, **({"base": "tiny:qwen3-64"} if label == "base" else {"source": "ft:base"})},
        "rollout": {
            "env_name": "GuessNumber",
            "env_config": {
                "style": "terse",
                "low": 1,
                "high": 6,
                "max_guesses": 4,
                "inconsistent_penalty": 0.2,
                "illegal_penalty": 0.4,
            },
            "max_turns": 4,
            "max_output_tokens": 3,
            "max_model_len": 256,
            "episodes_per_batch": 32,
        },
        "training": {
            "iterations_per_epoch": 2,
            "group_size": 8,
            "batch_size": 16,
            "update_epochs": 2,
            "learning_rate": 5e-3,
        },
        "loss": {"clip_low": 3e-3, "clip_high": 2e-2, "kl_coef": 0.01},
        "advantages": {"level": "turn"},
        "evaluation": {"seeds": "0:2", "every_n_iters": 2},
    }
    for section, keys in changes.items():
        values.setdefault(section, {}).update(keys)
    return RunConfig.from_dict(values)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run `base`, whose weights have learned the format of an answer, mostly."""
    folder = tmp_path_factory.mktemp("runs")
    warmup = {"policy": "random", "num_episodes": 512, "num_epochs": 2, "learning_rate": 3e-3, "batch_size": 32}
    run_training(
        config_of(folder, "base", {"warmup": warmup, "training": {"iterations_per_epoch": 1, "learning_rate": 1e-6}})
    )
    return folder


def judged(url: str) -> dict[str, Any]:
    criteria = [{"id": "said", "description": 'The answer has a "4".', "scale": "binary"}]
    rubric = {"criteria": criteria}
    options = {"event": True, "outcome": True, "provider": "local", "model": "fake-judge", "base_url": url}
    options["rubric_overrides"] = {"event": rubric, "outcome": rubric}
    return {"judge": {"enabled": True, "reward_blend": {"env": 0.5, "event": 0.3, "outcome": 0.2}, "options": options}}


def data_of(folder: Path) -> dict[str, Any]:
    """What stands in the page's file."""
    html = (folder / "report.html").read_text(encoding="utf-8")
    packed = re.search(r'id="data">([^<]*)<', html)
    assert packed is not None
    data: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(packed[1])))
    return data


def found_in(folder: Path) -> list[Finding]:
    """What a reader of nothing but the page's file finds."""
    assert main(["report", str(folder)]) == 0
    data = data_of(folder)
    findings = page_findings(data["runs"][0], data["steps"])
    assert data["runs"][0]["findings"][: len(findings)] == [dataclasses.asdict(finding) for finding in findings]
    return findings


def shift_the_mask(patch: Patch) -> None:
    """The classic: masks that belong to logits are laid on tokens."""

    def batch_tokens(trajectories: Sequence[Trajectory]) -> TokenBatch:
        batch = right(trajectories)
        names = ("action_mask", "turn_index", "rollout_logprobs")
        return dataclasses.replace(batch, **{name: getattr(batch, name).roll(-1, dims=1) for name in names})

    right = batching.batch_tokens
    patch.setattr(batching, "batch_tokens", batch_tokens)


def shift_the_record(patch: Patch) -> None:
    """The mask of the record itself begins a token early."""

    def append_action(self: Any, sampled: Completion, *, turn: int) -> None:
        self._actions.append((len(self) - 1, turn, sampled))
        self.append_context(sampled.token_ids)

    patch.setattr(record.OpenSegment, "append_action", append_action)


def give_the_siblings_advantage(patch: Patch) -> None:
    def batch_advantages(groups: Any, settings: Any, running: Any = None) -> Any:
        result = right(groups, settings, running)
        rows = iter(result.values)
        values: list[Any] = []
        for group in groups:
            own = list(itertools.islice(rows, len(group)))
            values += [np.resize(own[i - 1], len(own[i])) for i in range(len(own))]
        return dataclasses.replace(result, values=tuple(values))

    right = batching.batch_advantages
    patch.setattr(batching, "batch_advantages", batch_advantages)


def keep_old_weights(patch: Patch) -> None:
    """Updates never reach the engine, which says that they did."""

    def accept_weights(self: Any) -> None:
        if not hasattr(self, "first"):
            right(self)
            self.first = self.module
            for module in self.first.modules():
                for name, value in list(module._parameters.items()):
                    if value is not None:
                        module._parameters[name] = torch.nn.Parameter(value.detach().clone(), requires_grad=False)

    right = SharedModel.accept_weights
    patch.setattr(SharedModel, "accept_weights", accept_weights)
    patch.setattr(SharedModel, "weights_changed", lambda self: False)
    patch.setattr(SharedModel, "contents_changed", lambda self: False)


def forget_the_temperature(patch: Patch) -> None:
    """The learner scores at 1 what was sampled at rollout.temperature."""
    patch.setattr(RunConfig, "scored_sampling", property(lambda config: Sampling()))


def encode_again(patch: Patch) -> None:
    """The player gets text back, and encodes it: logprobs are cut or filled up to fit."""

    async def act(self: Any, request: Any) -> Completion:
        sampled = await right(self, request)
        renderer = request.renderer
        stop = renderer.stop_token_ids[0]
        text = renderer.decode([i for i in sampled.token_ids.tolist() if i not in renderer.stop_token_ids]).strip()
        ids = [*tokenizer.encode(text, add_special_tokens=False), stop][: request.max_tokens]
        logprobs = np.resize(sampled.logprobs, len(ids))
        return Completion(np.array(ids), logprobs, sampled.finish_reason, np.resize(sampled.weight_version, len(ids)))

    right, tokenizer = EngineActor.__call__, tiny_tokenizer()
    patch.setattr(EngineActor, "__call__", act)


def credit_late(patch: Patch) -> None:
    """Returns-to-go begin a turn late: a turn is credited with what the one before earned."""

    def returns_of(trajectory: Trajectory, **settings: Any) -> Any:
        rewards = [turn.reward or 0.0 for turn in trajectory.turns]
        late = [0.0, *rewards[:-1]]
        late[-1] += rewards[-1]
        turns = [dataclasses.replace(t, reward=r) for t, r in zip(trajectory.turns, late, strict=True)]
        return right(dataclasses.replace(trajectory, turns=tuple(turns)), **settings)

    right = batching.returns_of
    patch.setattr(batching, "returns_of", returns_of)
    patch.setattr(collect, "returns_of", returns_of)


def answer_late(patch: Patch) -> None:
    """The record gives a turn the reward of the answer before; the last two come together."""

    def append_answer(self: Any, result: StepResult) -> None:
        before = waiting.pop(id(self), None) if self.turns[1:] else None
        waiting[id(self)] = result
        reward, terms = (0.0, {}) if before is None else (before.reward, dict(before.reward_terms))
        if result.done:
            reward = (reward or 0.0) + (result.reward or 0.0)
            terms |= {name: terms.get(name, 0.0) + value for name, value in result.reward_terms.items()}
        right(self, dataclasses.replace(result, reward=reward, reward_terms=terms))

    waiting: dict[int, StepResult] = {}
    right = record.OpenEpisode.append_answer
    patch.setattr(record.OpenEpisode, "append_answer", append_answer)


def score_failures(patch: Patch) -> None:
    """An environment that breaks down now and then; what it breaks counts as an end with reward 0."""

    async def run_episode(request: Any, **given: Any) -> Trajectory:
        played = await right(request, **given)
        if played.error is None or not played.turns:
            return played
        turns = (*played.turns[:-1], dataclasses.replace(played.turns[-1], reward=0.0))
        return dataclasses.replace(played, outcome=Outcome.TRUNCATED, turns=turns)

    break_down(patch)
    right = episode.run_episode
    patch.setattr(episode, "run_episode", run_episode)
    patch.setattr(pool, "is_failed", lambda trajectory: False)


def break_down(patch: Patch) -> None:
    steps = itertools.count()

    def step(self: Any, action: str) -> Any:
        if next(steps) % 37 == 36:
            raise ConnectionError("the number server is gone")
        return right(self, action)

    right = GuessNumber.step
    patch.setattr(GuessNumber, "step", step)


def count_turns_for_episodes(patch: Patch) -> None:
    def count_denominators(*given: Any, **more: Any) -> Denominators:
        counts = right(*given, **more)
        return dataclasses.replace(counts, num_trajectories=counts.num_turns)

    right = losses.count_denominators
    patch.setattr(update, "count_denominators", count_denominators)


def swap_the_clip(patch: Patch) -> None:
    def policy_loss(*given: Any, settings: Any, **more: Any) -> Any:
        low, high = settings.clip_low, settings.clip_high
        return right(*given, settings=settings.model_copy(update={"clip_low": high, "clip_high": low}), **more)

    right = losses.policy_loss
    patch.setattr(update, "policy_loss", policy_loss)


def mix_judgements_up(patch: Patch) -> None:
    """Each episode is rewarded by the judgement that came before, where that fits."""
    last: list[Any] = []

    def blend(trajectory: Trajectory, judgement: Any, *given: Any) -> Trajectory:
        last.append(judgement)
        other = last[-2] if len(last) > 1 else judgement
        fits = len(other.event_reviews) == len(trajectory.turns)
        return right(trajectory, other if fits else judgement, *given)

    right = scorer.blend
    patch.setattr(scorer, "blend", blend)


def take_the_engines_logprobs(patch: Patch) -> None:
    """The engine computes in bfloat16, and its logprobs become the old ones."""

    def accept_weights(self: Any) -> None:
        right(self)
        names = [
            (module, name, value)
            for module in self.module.modules()
            for name, value in module._parameters.items()
            if value is not None
        ]
        for module, name, value in names:
            module._parameters[name] = torch.nn.Parameter(value.detach().to(torch.bfloat16), requires_grad=False)

    right = SharedModel.accept_weights
    patch.setattr(SharedModel, "accept_weights", accept_weights)
    patch.setattr(Learner, "_recomputes_old", False)


def play_one_twice(patch: Patch) -> None:
    def assemble(self: Any, request: Any, finished: Any) -> Any:
        group = right(self, request, finished)
        if len(group.trajectories) < 2:
            return group
        first, second, *others = group.trajectories
        twice = dataclasses.replace(first, trajectory_id=second.trajectory_id)
        return dataclasses.replace(group, trajectories=(first, twice, *others))

    right = pool.RolloutPool._assemble
    patch.setattr(pool.RolloutPool, "_assemble", assemble)


def add_noise(patch: Patch) -> None:
    """An engine with other kernels: its logprobs are off by some 1e-3 nats."""

    async def act(self: Any, request: Any) -> Completion:
        sampled = await right(self, request)
        noise = np.random.default_rng(request.sampling_seed).normal(0, 1e-3, len(sampled.logprobs))
        return dataclasses.replace(sampled, logprobs=np.minimum(sampled.logprobs + noise, 0).astype(np.float32))

    right = EngineActor.__call__
    patch.setattr(EngineActor, "__call__", act)


def stamp_old_versions(patch: Patch) -> None:
    """The engine says that the weights before the newest ones sampled."""

    async def act(self: Any, request: Any) -> Completion:
        sampled = await right(self, request)
        return dataclasses.replace(sampled, weight_version=np.maximum(sampled.weight_version - 1, 0))

    right = EngineActor.__call__
    patch.setattr(EngineActor, "__call__", act)


def double_the_advantages(patch: Patch) -> None:
    def batch_advantages(*given: Any, **more: Any) -> Any:
        result = right(*given, **more)
        return dataclasses.replace(result, values=tuple(2 * value for value in result.values))

    right = batching.batch_advantages
    patch.setattr(batching, "batch_advantages", batch_advantages)


def take_ratios_of_tokens(patch: Patch) -> None:
    def policy_loss(*given: Any, settings: Any, **more: Any) -> Any:
        return right(*given, settings=settings.model_copy(update={"unit": "token"}), **more)

    right = losses.policy_loss
    patch.setattr(update, "policy_loss", policy_loss)


BUGS: list[tuple[Callable[[Patch], None], str, dict[str, Any]]] = [
    (shift_the_mask, "mask_is_shifted", {}),
    (shift_the_record, "mask_is_shifted", {}),
    (give_the_siblings_advantage, "advantage_is_a_siblings", {}),
    (keep_old_weights, "weights_are_stale", {}),
    (forget_the_temperature, "temperatures_differ", {"rollout": {"temperature": 1.2}}),
    (encode_again, "tokens_are_not_the_sampled_ones", {}),
    (credit_late, "rewards_come_late", {}),
    (answer_late, "rewards_come_late", {}),
    (score_failures, "failed_episode_counts", {}),
    (count_turns_for_episodes, "denominators_are_others", {}),
    (swap_the_clip, "clip_sides_are_swapped", {}),
    (mix_judgements_up, "judgement_is_anothers", {"judge": {}}),
    (take_the_engines_logprobs, "old_logprobs_are_others", {}),
    (play_one_twice, "episodes_are_duplicated", {}),
    (add_noise, "precisions_differ", {}),
    (stamp_old_versions, "weights_are_stale", {}),
    (double_the_advantages, "advantages_are_others", {}),
    (take_ratios_of_tokens, "terms_are_others", {}),
]


def test_every_finding_in_recorded_tokens_has_a_planted_bug() -> None:
    assert {check for _, check, _ in BUGS} == set(tokens._TEXTS)


@pytest.mark.parametrize(
    ("plant", "check", "changes"),
    slow_but(BUGS, {shift_the_mask, keep_old_weights, credit_late, swap_the_clip, play_one_twice}),
    ids=[bug[0].__name__ for bug in BUGS],
)
def test_a_planted_bug_is_the_first_finding(
    runs: Path,
    url: str,
    monkeypatch: Patch,
    capsys: pytest.CaptureFixture[str],
    plant: Callable[[Patch], None],
    check: str,
    changes: dict[str, Any],
) -> None:
    config = config_of(runs, plant.__name__, judged(url) if "judge" in changes else changes)
    with monkeypatch.context() as patch:
        plant(patch)
        run_training(config)
    first, *_ = found_in(config.run_folder)
    assert first.check == check
    printed = capsys.readouterr().out
    assert "episodes checked: WRONG DATA\n\nSERIOUS  " in printed
    assert first.problem in " ".join(printed.split())


GOOD: dict[str, tuple[Callable[[Patch], None] | None, dict[str, Any]]] = {
    "gspo_token, failures": (break_down, {}),
    "gspo, masks": (
        None,
        {
            "algorithm": {"variety": "gspo"},
            "advantages": {"level": "trajectory", "clip": 1.5},
            "rewards": {"overlong": "mask"},
            "training": {"constant_groups": "drop"},
        },
    ),
    "as GRPO": (
        None,
        {
            "algorithm": {"variety": "grpo"},
            "loss": {
                "unit": "token",
                "aggregation": "dapo",
                "clip_low": 0.1,
                "clip_high": 0.2,
                "dual_clip": 1.3,
                "entropy_coef": 0.01,
                "kl_coef": 0.0,
            },
            "advantages": {"level": "trajectory"},
            "rollout": {"temperature": 0.8},
        },
    ),
    "judged, played ahead": (
        break_down,
        {
            "judge": {},
            "training": {"max_staleness": 1},
            "correction": {"old_logprobs": "rollout"},
            "loss": {"unit": "turn", "aggregation": "turn-mean-token-mean"},
        },
    ),
    "as with vLLM": (
        add_noise,
        {
            "correction": {"level": "token", "mode": "mask", "low": 0.9985, "high": 1.0015, "max_engine_gap": 0.02},
            "rewards": {"overlong": 1.0},
        },
    ),
    "bfloat16, an adapter": (
        None,
        {
            "model": {"trainer_mode": "lora", "dtype": "bfloat16"},
            "correction": {"old_logprobs": "rollout"},
            "loss": {"kl_coef": 0.0},
        },
    ),
    "a teacher beside the reward": (None, {"distillation": {"teacher": "base", "baseline": True, "coefficient": 0.5}}),
    "a teacher alone": (
        None,
        {
            "distillation": {"teacher": "base", "reward": False},
            "loss": {"kl_coef": 0.0, "clip_low": 3e-4, "clip_high": 4e-4},  # the defaults: nothing is clipped
        },
    ),
    "a teacher of distributions": (None, {"distillation": {"teacher": "base", "divergence": "forward_kl"}}),
}


@pytest.mark.parametrize("name", slow_but(GOOD, {"gspo, masks", "as with vLLM"}))
def test_a_good_run_has_no_finding(runs: Path, url: str, monkeypatch: Patch, name: str) -> None:
    plant, changes = GOOD[name]
    given = {**changes, **judged(url)} if "judge" in changes else changes
    config = config_of(runs, name.replace(" ", "_").replace(",", ""), given)
    with monkeypatch.context() as patch:
        if plant is not None:
            plant(patch)
        run_training(config)
    assert found_in(config.run_folder) == []


@pytest.mark.slow
def test_a_page_of_some_episodes_divides_by_all_that_a_teacher_with_feedback_taught(runs: Path) -> None:
    teacher = {"teacher": "self", "feedback": "environment"}
    config = config_of(runs, "taught_by_feedback", {"distillation": teacher, "loss": {"kl_coef": 0.0}})
    run_training(config)
    run = run_values(config.run_folder)
    shown = [step_values(config.run_folder, "step_000002", max_episodes=number) for number in (8, 32)]
    taught = [
        sum(x is not None for g in step["groups"] for e in g["episodes"] for x in e["columns"]["teacher_log_ratio"])
        for step in shown
    ]
    assert 0 < taught[0] < taught[1]
    assert sum(shown[0]["update"]["taught"]) == 2 * taught[1]  # in each of two passes
    assert [page_findings(run, [step]) for step in shown] == [[], []]


def cut_weights(ratios: losses.Ratios, settings: Any) -> torch.Tensor:
    """CISPO with a floor: a ratio outside of the range weighs as its bound does, and keeps its gradient."""
    weight = ratios.s.detach().clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return weight * ratios.advantage * ratios.one


def test_a_surrogate_that_is_added_to_the_learner_alone_is_right_on_the_page(runs: Path, monkeypatch: Patch) -> None:
    config = config_of(runs, "another_surrogate", {"loss": {"kl_coef": 0.0}})
    monkeypatch.setitem(losses.SURROGATES, "clip", cut_weights)
    run_training(config)
    assert found_in(config.run_folder) == []
    monkeypatch.undo()
    assert len(found_in(config.run_folder)) == 1  # by the rule that the settings then stand for


@pytest.mark.parametrize(
    "changes", [{"loss": {"retired": 1}}, {"distillation": {"teacher": "t", "divergence": "of_a_later_version"}}]
)
def test_settings_of_another_version_are_not_judged(changes: dict[str, Any]) -> None:
    rules = {"loss": {}, "advantages": {}, "rewards": {}, "distillation": None} | changes
    assert page_findings({"rules": rules}, [{"name": "step_000001", "step": 1, "groups": []}]) == []


@pytest.mark.parametrize("is_late", [False, True])
def test_rewards_are_late_only_where_siblings_part_in_a_turn_that_can_earn(is_late: bool) -> None:
    """Eight groups of four, turns of one token, -0.01 a turn and +0.5 for an action of 1.

    All think differently in turn 0, and the action of turn 1 earns. Or those of turns 0 and 1 earn, a turn late.
    """

    def played(group: int, member: int) -> dict[str, Any]:
        actions = [member // 2 if is_late else member, member % 2, 0]
        earned = [0, actions[0], actions[1]] if is_late else [0, actions[1], 0]
        turns = [
            {"segment": 0, "observation": [2 * k, 2 * k + 1], "action": [2 * k + 1, 2 * k + 2]}
            | {"reward": -0.01 + 0.5 * earned[k]}
            for k in range(3)
        ]
        segments = [{"ids": [i for action in actions for i in (9, action)], "sampled": [1, 3, 5]}]
        return {"id": f"{group}/{member}", "segments": segments, "turns": turns}

    groups = [{"episodes": [played(group, member) for member in range(4)]} for group in range(8)]
    told = rewards_follow_the_turn_before(StepView({"rules": {}}, {"name": "step_000001", "step": 1, "groups": groups}))
    assert (told is not None) == is_late


@pytest.mark.parametrize(("loss", "is_wrong"), [(0.0035, False), (0.0055, True)])
def test_a_loss_whose_terms_cancel_is_compared_by_their_sizes(loss: float, is_wrong: bool) -> None:
    """Terms of +200 and -200 in float32 sum to 0 within 1e-5 of 400: 0.004."""
    update = {"shares": 0.0, "share_sizes": 400.0}
    values = {"name": "step_000001", "step": 1, "groups": [], "update": update, "loss": loss}
    view = StepView({"rules": {"loss": {}}}, values)
    assert (terms_are_others(view) is not None) == is_wrong


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_share_that_is_no_number_is_named_and_the_page_is_written(runs: Path, tmp_path: Path, number: float) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs / "base", folder)
    recorded = open_tokens(folder, 1)
    columns = recorded.columns()
    columns["share"][0, np.flatnonzero(columns["fate"] == Fate.TRAINED)[-1]] = number
    sizes = {name: stop - start for name, (start, stop) in recorded.spans.items()}
    token_path(folder, 1).write_bytes(pack_columns(1, sizes, columns, {}))
    (found,) = found_in(folder)
    assert found.check == "terms_are_others"
    assert "its share of the loss is nan" in found.evidence  # a page has null for what is not finite


def test_a_report_says_what_it_did_not_check(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs / "base", folder)

    def told() -> str:
        assert main(["report", str(folder)]) == 0
        line = capsys.readouterr().out.splitlines()[1]
        assert data_of(folder)["runs"][0]["checked"] == line
        return line

    assert told() == "34 episodes checked: their numbers agree"
    shutil.rmtree(folder / "tokens")
    assert told() == "34 episodes checked: their numbers agree; no tokens are recorded: only episodes were checked"
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config.replace("[loss]\n", "[loss]\nretired = 1\n"))
    assert told() == "34 episodes: this version does not know loss.retired: not checked"
    (folder / "config.toml").write_text(config)
    shutil.rmtree(folder / "episodes")
    assert told() == "no episodes are recorded: nothing was checked"
