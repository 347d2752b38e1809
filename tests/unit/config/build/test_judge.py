"""[judge] becomes judges: every key changes what is built, and what cannot be built is said before a run begins."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from rule_judge import RuleJudge
from scripted_judge import episode

from gspo_gym.config.build.judge import build_judging, rewards_of_turns
from gspo_gym.config.reference import leaf_keys
from gspo_gym.config.run_config import RunConfig
from gspo_gym.errors import ConfigError, GymError, ServiceError, UnknownNameError, UnscoredError
from gspo_gym.judge.base import JudgeRequest, Rubrics
from gspo_gym.judge.gold import DriftCheck
from gspo_gym.judge.rubric_files import parse_rubrics
from gspo_gym.judge.server import create_judge_app
from gspo_gym.judge.settings import JudgeModelSettings, PanelEntry, ReadingSettings
from gspo_gym.remote.serving import BackgroundServer
from gspo_gym.rollout.episode_files import write_episodes
from gspo_gym.run.judging import Judging
from gspo_gym.run.recording import RunRecorder
from gspo_gym.types import Task, Turn

ROOT = Path(__file__).parents[4]
RUBRIC = {
    "event": {"goal_text": "One step.", "criteria": [{"id": "process.tone", "description": "Polite."},
                                                     {"id": "progress.found", "description": "Found."}]},
    "outcome": {"criteria": [{"id": "outcome.solved", "description": "Solved.", "weight": 3.0},
                             {"id": "progress.pace", "description": "Quick."}]},
}  # fmt: skip
BASE: dict[str, Any] = {
    "model": {"base": "tiny:qwen3-64", "label": "judged"},
    "rollout": {"env_name": "GuessNumber", "env_config": {"style": "terse"},
                "max_turns": 4, "max_output_tokens": 3, "max_model_len": 256,
                "episodes_per_batch": 8},
    "training": {"iterations_per_epoch": 2, "group_size": 4, "batch_size": 8, "learning_rate": 1e-3},
    "evaluation": {"seeds": "0:4"},
    "judge": {
        "enabled": True,
        "reward_blend": {"env": 0.2, "event": 0.4, "outcome": 0.4},
        "options": {"event": True, "outcome": True, "provider": "local", "base_url": "http://127.0.0.1:1/v1",
                    "model": "m", "rubric_overrides": RUBRIC},
    },
}  # fmt: skip
SYNTH = {"services.judge_url": "http://127.0.0.1:2", "judge.options.base_url": None, "judge.options.provider": None}
PYTHON = {"judge.options.python": "scripted_judge:say_half", "judge.options.provider": None,
          "judge.options.model": None, "judge.options.base_url": None}  # fmt: skip
MEMBERS = [{"model": "a", "base_url": "http://127.0.0.1:3/v1"}, {"model": "b", "base_url": "http://127.0.0.1:3/v1"}]
PANEL = {"judge.panel": MEMBERS, "judge.options.provider": None, "judge.options.model": None,
         "judge.options.base_url": None}  # fmt: skip
GOLD_JUDGE = {"model": "better", "base_url": "http://127.0.0.1:4/v1"}
GOLD = {"judge.gold.panel": [GOLD_JUDGE]}
PRICES = {"judge.options.usd_per_million_tokens": [1.0, 4.0]}

# Keys with another value, and what else must be said for it to be valid; the comparison is with that alone.
OTHER: dict[str, tuple[Any, dict[str, Any]]] = {
    "services.judge_url": ("http://127.0.0.1:9/api", SYNTH),
    "judge.enabled": (False, {"judge.reward_blend": {"env": 1.0}}),
    "judge.timeout_s": (7.0, {}),
    "judge.panel": ([*MEMBERS, MEMBERS[0]], PANEL),
    "judge.reward_blend.env": (0.5, {}),
    "judge.reward_blend.event": (0.5, {}),
    "judge.reward_blend.outcome": (0.5, {}),
    "judge.options.provider": ("openai", {"judge.options.api_key_env": "A_KEY"}),
    "judge.options.model": ("n", {}),
    "judge.options.base_url": ("http://127.0.0.1:9/v1", {}),
    "judge.options.api_key_env": ("ANOTHER_KEY", {"judge.options.api_key_env": "A_KEY"}),
    "judge.options.python": ("scripted_judge:say_one", PYTHON),
    "judge.options.temperature": (0.7, {}),
    "judge.options.max_output_tokens": (99, {}),
    "judge.options.usd_per_million_tokens": ([2.0, 4.0], PRICES),
    "judge.options.event": (False, {"judge.reward_blend.event": 0.0}),
    "judge.options.outcome": (False, {"judge.reward_blend.outcome": 0.0}),
    "judge.options.rubric_id": ("envs/wordle/rubric.yaml", {"judge.options.rubric_overrides": None,
                                                     "judge.options.rubric_id": "countdown/bundle@v1"}),
    "judge.options.rubric_overrides": ({**RUBRIC, "outcome": RUBRIC["event"]}, {}),
    "judge.options.tracks": (["progress"], {}),
    "judge.options.weights": ({"progress": 0.5}, {}),
    "judge.options.mode": ("turn", {}),
    "judge.options.samples": (3, {"judge.options.temperature": 1.0}),
    "judge.options.max_concurrency": (3, {}),
    "judge.options.max_calls": (100, {}),
    "judge.options.max_cost_usd": (5.0, PRICES),
    "judge.options.cache": ("CACHE", {}),
    "judge.gold.panel": ([GOLD_JUDGE, {"python": "scripted_judge:say_one"}], GOLD),
    "judge.gold.episodes": ("OTHER_EPISODES", {"judge.gold.episodes": "EPISODES", "judge.gold.labels": "LABELS"}),
    "judge.gold.labels": ("OTHER_LABELS", {"judge.gold.episodes": "EPISODES", "judge.gold.labels": "LABELS"}),
    "judge.gold.on_drift": ("stop", GOLD),
}  # fmt: skip


def changed(changes: dict[str, Any]) -> RunConfig:
    values = copy.deepcopy(BASE)
    for key, value in changes.items():
        *above, name = key.split(".")
        table = values
        for part in above:
            table = table.setdefault(part, {})
        if value is None:
            table.pop(name, None)
        else:
            table[name] = copy.deepcopy(value)
    return RunConfig.from_dict(values)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the project, keys that are set, and the files that the changes name in capitals."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("A_KEY", "a")
    monkeypatch.setenv("ANOTHER_KEY", "b")
    write_episodes(tmp_path / "EPISODES", [episode([1.0], name="a"), episode([0.0], name="b")])
    write_episodes(tmp_path / "OTHER_EPISODES", [episode([1.0, 1.0], name="a"), episode([0.0], name="b")])
    for name, score in (("LABELS", 1.0), ("OTHER_LABELS", 0.5)):
        lines = [json.dumps({"trajectory_id": which, "outcome": score}) + "\n" for which in ("a", "b")]
        (tmp_path / name).write_text("".join(lines), encoding="utf-8")
    return tmp_path


def placed(changes: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Names in capitals are files in the folder."""
    return {
        key: str(folder / value) if isinstance(value, str) and value.isupper() and "KEY" not in value else value
        for key, value in changes.items()
    }


SENT = ("provider", "model", "rubric_id", "rubric_overrides", "tracks", "weights", "event", "outcome")


def described(thing: Any) -> Any:
    """What a judge, or anything of it, is made of, in values that compare."""
    name = type(thing).__name__
    if name == "JudgementCache":
        return thing._folder
    if name == "ModelJudge":
        # Of the sections that it is given it reads these keys alone.
        read = (JudgeModelSettings.of(thing.settings.model), ReadingSettings.of(thing.settings.reading))
        return (
            name,
            read,
            dataclasses.replace(thing.settings, model=read[0], reading=read[1]),
            described(thing._cache),
        )
    if name == "HttpJudge":
        sent = {key: getattr(thing._options, key) for key in SENT}
        has_key = thing._asking._client._api_key is not None
        return (name, thing.name, has_key, sent, thing._timeout_seconds, described(thing._cache))
    if name == "PanelJudge":
        return (name, [described(judge) for judge in thing._judges])
    if name == "PythonJudge":
        return (name, thing.name, thing._timeout_seconds)
    if name == "function":  # a comparison with gold
        parts = dict(inspect.getclosurevars(thing).nonlocals)
        parts |= inspect.getclosurevars(parts.pop("scores")).nonlocals
        labelled = [(pair[0].trajectory_id, len(pair[0].turns), pair[1]) for pair in parts.pop("labelled", ())]
        parts.pop("rubrics_of")
        return (thing.__qualname__, labelled, {key: described(part) for key, part in parts.items()})
    if name == "GoldWatch":
        return (described(thing._compare), thing._every, thing._stops)
    return thing


async def _described(judging: Judging) -> Any:
    scorer = judging.for_training._score
    try:
        return (
            described(judging.judge._judge),
            scorer._weights,
            await scorer._rubrics_of(Task("GuessNumber", 0)),
            judging.for_training.limits,
            judging._budget.limits,
            described(judging._gold),
        )
    finally:
        await judging.close()


def what_is_built(config: RunConfig) -> Any:
    try:
        judging = build_judging(config)
        return None if judging is None else asyncio.run(_described(judging))
    except GymError as error:
        return str(error)


def test_every_leaf_key_of_the_judge_is_tried_once() -> None:
    assert sorted(OTHER) == sorted(["services.judge_url", *(key for key in leaf_keys() if key.startswith("judge."))])


@pytest.mark.parametrize("key", OTHER)
def test_another_value_builds_another_judge(key: str, files: Path) -> None:
    value, more = OTHER[key]
    without = what_is_built(changed(placed(more, files)))
    assert without is not None
    assert not isinstance(without, str), without
    assert what_is_built(changed(placed({**more, key: value}, files))) != without


@pytest.mark.parametrize("name", PanelEntry.model_fields)
def test_another_value_of_a_member_builds_another_panel(name: str, files: Path) -> None:
    value, more = OTHER[f"judge.options.{name}"]  # a member is described as the only judge is
    others = {key.removeprefix("judge.options."): other for key, other in more.items() if other is not None}
    member = others if name == "python" else {**MEMBERS[1], **others}

    def panel(changes: dict[str, Any]) -> Any:
        return what_is_built(changed(placed({**PANEL, "judge.panel": [{**member, **changes}, MEMBERS[0]]}, files)))

    without = panel({})
    assert not isinstance(without, str), without
    assert panel({name: value}) != without


def test_the_same_config_builds_the_same_judge(files: Path) -> None:
    assert what_is_built(changed(placed(GOLD, files))) == what_is_built(changed(placed(GOLD, files)))


def test_overrides_tracks_and_weights_beside_an_id_are_sent_to_the_judge_and_used_there(files: Path) -> None:
    """Of two criteria in two tracks, weighed 1 and 3 there, scored 1 and 0: 1 / 4; the third track is not judged."""
    criteria = [{"id": f"{track}.a", "description": track, "scale": "binary"} for track in ("process", "progress")]
    theirs = parse_rubrics({"outcome": [*criteria, {"id": "reasoning.a", "description": "r"}]}, where="there")
    judge = RuleJudge(lambda _episode, criterion, _place, _turn: float(criterion.track == "process"))
    with BackgroundServer(create_judge_app(judge, find_rubrics={"mine@v1": theirs}.__getitem__)) as server:
        changes = {
            **SYNTH,
            "services.judge_url": server.url,
            "judge.reward_blend.event": 0.0,
            "judge.options.event": False,
            "judge.options.rubric_id": "mine@v1",
            "judge.options.rubric_overrides": {"outcome": {"criteria": [{"id": "process.a", "description": "Else."}]}},
            "judge.options.tracks": ["process", "progress"],
            "judge.options.weights": {"progress": 3.0},
        }
        judging = build_judging(changed(placed(changes, files)))
        assert judging is not None

        async def ask() -> Any:
            try:
                return await judging.judge.judge(JudgeRequest(episode([1.0]), Rubrics()))
            finally:
                await judging.close()

        judgement = asyncio.run(ask())
    assert judgement.outcome_total == 0.25
    outcome = judge.asked[0].rubrics.outcome
    assert outcome is not None
    assert [criterion.description for criterion in outcome.criteria] == ["Else.", "progress"]
    assert outcome.track_weights == {"process": 1.0, "progress": 3.0}


def test_without_a_judge_nothing_is_built() -> None:
    assert build_judging(changed({"judge": None})) is None


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"judge.options.rubric_overrides": None, "judge.options.rubric_id": "no/such@v1"}, UnknownNameError,
         "no/such@v1"),
        ({"judge.options.rubric_id": "none.yaml"}, ConfigError, "none.yaml: there is no such file"),
        ({"judge.options.rubric_overrides": {"outcome": RUBRIC["outcome"]}}, ConfigError,
         r"judge\.options\.event: true, but the rubric has no part 'event'; add one, for example under "
         r"judge\.options\.rubric_overrides\.event, or set false"),
        ({"judge.options.provider": "groq"}, ConfigError, "GROQ_API_KEY"),
        ({"judge.options.tracks": ["nothing"]}, ConfigError, "nothing"),
        ({**PYTHON, "judge.options.python": "no.such:function"}, ConfigError, "no.such"),
        ({"judge.gold.episodes": "none.jsonl", "judge.gold.labels": "none.labels"}, ConfigError, "none.labels"),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_said_before_the_run(
    changes: dict[str, Any], error: type[Exception], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GROQ_API_KEY", raising=False)
    with pytest.raises(error, match=match):
        build_judging(changed(changes))


def test_the_hosted_judge_gets_its_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    config = changed({**SYNTH, "judge.options.rubric_overrides": None})
    monkeypatch.delenv("JUDGE_API_KEY", raising=False)
    assert not what_is_built(config)[0][2]
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    built = what_is_built(config)
    assert built[0][2]
    assert "secret" not in repr(built)


def test_a_tasks_own_rubric_goes_over_the_configurations() -> None:
    async def own(task: Task) -> dict[str, Any] | None:
        own_rubric = {"outcome": {"criteria": [{"id": "outcome.solved", "description": "Solved in French."}]}}
        return own_rubric if task.seed == 1 else None

    judging = build_judging(changed({}), own)
    assert judging is not None

    async def rubrics(seed: int) -> Rubrics:
        return await judging.for_training._score._rubrics_of(Task("GuessNumber", seed))

    async def both() -> tuple[Rubrics, Rubrics]:
        try:
            return await rubrics(0), await rubrics(1)
        finally:
            await judging.close()

    plain, other = asyncio.run(both())
    assert plain.outcome is not None
    assert other.outcome is not None
    assert [c.description for c in plain.outcome.criteria] == ["Solved.", "Quick."]
    assert [c.description for c in other.outcome.criteria] == ["Solved in French.", "Quick."]


@pytest.mark.parametrize(
    "wrong", [ServiceError("no answer"), {"outcome": {"criteria": [{"id": "x", "weight": "much"}]}}]
)
def test_a_task_whose_own_rubric_cannot_be_had_is_unscored_and_ends_no_run(wrong: Any) -> None:
    async def own(_: Task) -> dict[str, Any]:
        if isinstance(wrong, Exception):
            raise wrong
        rubric: dict[str, Any] = wrong
        return rubric

    async def score() -> None:
        judging = build_judging(changed({}), own)
        assert judging is not None
        try:
            await judging.for_training._score(episode([1.0]))
        finally:
            await judging.close()

    with pytest.raises(UnscoredError, match="the rubric of task Test-v0#7 itself"):
        asyncio.run(score())


def test_step_rewards_that_replace_the_environments_are_in_the_blend_and_not_made_twice() -> None:
    """decision_stepwise alone would throw the judge's part away; a name of an event is worth 1 there."""
    changes = {**PYTHON, "judge.reward_blend": {"env": 0.5, "outcome": 1.0}, "judge.options.event": False,
               "training.step_rewards_mode": "decision_stepwise"}  # fmt: skip
    config = changed(changes)
    assert rewards_of_turns(config).mode == "env_sparse"
    assert rewards_of_turns(changed({"judge": None, "training.step_rewards_mode": "decision_stepwise"})).mode == (
        "decision_stepwise"
    )
    played = episode([0.25, 0.25])
    turns: list[Turn] = [dataclasses.replace(played.turns[0], events=("found",)), played.turns[1]]
    played = dataclasses.replace(played, turns=tuple(turns))

    async def scored() -> list[float | None]:
        judging = build_judging(config)
        assert judging is not None
        try:
            return [turn.reward for turn in (await judging.for_training._score(played)).turns]
        finally:
            await judging.close()

    assert asyncio.run(scored()) == [0.5, 0.5]  # 0.5 * 1 for the event; 1.0 * 0.5 for the outcome


def test_a_resumed_run_remembers_its_first_comparison_with_gold(files: Path) -> None:
    first = DriftCheck(32, 0.5, 0.4, 0.1, 0.01, 0.9)
    recorder = RunRecorder.create(files / "run", "")
    recorder.event("judge_gold", 1, {"of_step": 1, **dataclasses.asdict(first)})
    recorder.event("judge_gold", 10, {"of_step": 10, **dataclasses.asdict(first), "gap": 0.3})
    judging = build_judging(changed(GOLD))
    assert judging is not None
    assert judging._gold is not None
    judging.record_into(files / "run", recorder.event, step=10)
    asyncio.run(judging.close())
    assert judging._gold._first == first


def test_a_function_judges_what_was_played() -> None:
    async def said() -> float:
        judging = build_judging(changed({**PYTHON, "judge.options.event": False, "judge.reward_blend.event": 0.0}))
        assert judging is not None
        try:
            rubrics = await judging.for_training._score._rubrics_of(Task("GuessNumber", 0))
            return (await judging.judge.judge(JudgeRequest(episode([1.0]), rubrics))).outcome_total
        finally:
            await judging.close()

    assert asyncio.run(said()) == 0.5
