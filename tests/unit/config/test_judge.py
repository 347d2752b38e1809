"""[judge]: what it must say, what contradicts what, and that every answer names the fix.

A valid judge is in VALID; each case changes it. The rules are `config/rules/judge.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from gspo_gym.config.run_config import RunConfig, load_config
from gspo_gym.errors import ConfigError
from gspo_gym.judge.settings import JudgeModelSettings

Problems = Callable[[dict[str, Any]], list[str]]
Make = Callable[[dict[str, Any]], RunConfig]

VALID: dict[str, Any] = {
    "judge.enabled": True,
    "judge.reward_blend": {"env": 0.2, "event": 0.4, "outcome": 0.4},
    "judge.options": {
        "event": True,
        "outcome": True,
        "provider": "groq",
        "model": "m",
        "rubric_id": "support_desk/bundle@v1",
    },
}
MEMBER = {"provider": "openai", "model": "a"}
PANEL = {"judge.panel": [MEMBER, {"provider": "groq", "model": "b"}], "judge.options.model": ...,
         "judge.options.provider": ...}  # fmt: skip
GROUP = {"judge.options.mode": "group", "judge.options.event": False,
         "judge.reward_blend": {"env": 0.2, "outcome": 0.8}}  # fmt: skip
SYNTH = {"services": {"judge_url": "https://judge.example.org/api"}}
PYTHON = {"judge.options.python": "mine:judge", "judge.options.model": ..., "judge.options.provider": ...}


def judged(changes: dict[str, Any]) -> dict[str, Any]:
    """VALID with changes; a value of ... removes the key."""
    values = {**copy.deepcopy(VALID), **copy.deepcopy(changes)}
    options = values.get("judge.options")
    for key in [key for key in values if key.startswith("judge.options.") and isinstance(options, dict)]:
        name, value = key.removeprefix("judge.options."), values.pop(key)
        if value is ...:
            options.pop(name, None)
        else:
            options[name] = value
    return {key: value for key, value in values.items() if value is not ...}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    # what scores are worth
    "a blend of nothing": (
        {"judge.reward_blend": {"env": 0.0}},
        "judge.reward_blend.env: expected one weight > 0 at least, got env = event = outcome = 0",
    ),
    "no blend": (
        {"judge.reward_blend": ...},
        "judge.enabled: true, but without judge.reward_blend the judge's scores weigh 0; give it, such as { env = 0.2, "
        "event = 0.4, outcome = 0.4 } (or event = 0.0, if the judge is only to be watched)",
    ),
    "event weight without event judging": (
        {"judge.options.event": False},
        "judge.reward_blend.event: expected 0 while judge.options.event is not true, got 0.4: set that to true, or "
        "this to 0",
    ),
    "outcome weight without outcome judging": (
        {"judge.options.outcome": ...},
        "judge.reward_blend.outcome: expected 0 while judge.options.outcome is not true, got 0.4: set that to true, or "
        "this to 0",
    ),
    # who judges
    "a judge without options": (
        {"judge.options": ..., "judge.reward_blend": {"env": 1.0}, **SYNTH},
        "judge.enabled: true needs judge.options with event or outcome = true, and has no options at all",
    ),
    "a judge without a model": (
        {"judge.options.model": ...},
        "judge.enabled: true needs judge.options with model",
    ),
    "a judge without a place": (
        {"judge.options.provider": ...},
        "judge.enabled: true needs judge.options with provider",
    ),
    "the hosted judge without its address": (
        {"judge.type": "synth"},
        'judge.type: "synth" needs services.judge_url, where that judge answers; for a model behind an '
        "OpenAI-compatible endpoint leave this out",
    ),
    "a judge of another type": (
        {"judge.type": "model"},
        'judge.type: expected "synth", got "model": remove it, for a model or a function is what judge.options says',
    ),
    "a function beside an address": (
        {**SYNTH, "judge.options.python": "mine:judge"},
        "judge.options.python: has no effect beside services.judge_url or [[judge.panel]]: remove one of them",
    ),
    "a model beside a function": (
        {**PYTHON, "judge.options.model": "m"},
        "judge.options.model: has no effect: judge.options.python is no model; remove this",
    ),
    "an endpoint beside an address": (
        {**SYNTH, "judge.options.base_url": "http://127.0.0.1:1/v1"},
        "judge.options.base_url: has no effect: the judge at services.judge_url has its own; remove this",
    ),
    "a local model without its address": (
        {"judge.options.provider": "local"},
        'judge.options.provider: "local" needs base_url, such as "http://127.0.0.1:8000/v1"',
    ),
    "a panel of one": (
        {**PANEL, "judge.panel": [MEMBER]},
        "judge.panel: expected two judges at least, got one: write it into [judge.options]",
    ),
    "a member without a model": (
        {**PANEL, "judge.panel": [MEMBER, {"provider": "groq"}]},
        "judge.panel: member 1: needs model, or python",
    ),
    "a member that is both": (
        {**PANEL, "judge.panel": [MEMBER, {"python": "mine:judge", "model": "m"}]},
        "judge.panel: member 1: python is no model, so model has no effect: remove one",
    ),
    "groups compared by turns": (
        {"judge.options.mode": "group"},
        'judge.options.mode: "group" compares whole episodes: set judge.options.event = false and '
        "judge.reward_blend.event = 0",
    ),
    "groups of one": (
        {**GROUP, "training.group_size": 1, "advantages.baseline": "batch"},
        'judge.options.mode: "group" compares 2 to 24 episodes in a call: training.group_size is 1',
    ),
    "groups too large": (
        {**GROUP, "training.group_size": 32},
        'judge.options.mode: "group" compares 2 to 24 episodes in a call: training.group_size is 32',
    ),
    "groups compared beside forks": (
        {
            **GROUP,
            "rollout.forks_per_episode": 1,
            "advantages.level": "trajectory",
            "advantages.baseline": "leave_one_out",
            "advantages.scale": "none",
        },
        'rollout.forks_per_episode: forks repeat turns of the episodes that judge.options.mode = "group" compares: set '
        'that to "auto", or remove this',
    ),
    "groups compared beside a function": (
        {**GROUP, **PANEL, "judge.panel": [MEMBER, {"python": "mine:judge"}]},
        'judge.options.mode: "group" asks models alone: remove the python member of [[judge.panel]], or set this to '
        '"auto"',
    ),
    "groups compared beside gold": (
        {**GROUP, "judge.gold": {"panel": [MEMBER]}},
        'judge.options.mode: "group" gives scores within a group, whose mean says nothing beside gold: remove '
        '[judge.gold], and compare by `gspo-gym judge audit`, or set this to "auto"',
    ),
    "a panel's model elsewhere": (
        {**PANEL, "judge.options.model": "m"},
        "judge.options.model: has no effect: the members of [[judge.panel]] have their own; remove this",
    ),
    # by what
    "no rubric": (
        {"judge.options.rubric_id": ...},
        "judge.enabled: true needs a rubric: judge.options.rubric_id (a file, or an id such as support_desk/bundle@v1) "
        "or rubric_overrides",
    ),
    "weight of a track that is not judged": (
        {"judge.options.tracks": ["process"], "judge.options.weights": {"progress": 0.5}},
        'judge.options.weights: "progress" is not in judge.options.tracks = ["process"], so that its weight has no '
        "effect",
    ),
    # how often, and for how much
    "samples that are the same": (
        {"judge.options.samples": 3},
        "judge.options.samples: 3 samples at judge.options.temperature = 0 are one and the same: raise that, or set 1",
    ),
    "money without prices": (
        {"judge.options.max_cost_usd": 5.0},
        "judge.options.max_cost_usd: needs prices: give usd_per_million_tokens of every model, or limit max_calls "
        "instead",
    ),
    "money and a member without prices": (
        {
            **PANEL,
            "judge.options.max_cost_usd": 5.0,
            "judge.panel": [
                {**MEMBER, "usd_per_million_tokens": [0.1, 0.4]},
                MEMBER,
            ],
        },
        "judge.options.max_cost_usd: needs prices: give usd_per_million_tokens of every model, or limit max_calls "
        "instead",
    ),
    "turns for a function": (
        {**PYTHON, "judge.options.mode": "turn"},
        "judge.options.mode: has no effect: only a model is asked by turns or by groups; remove this",
    ),
    # gold
    "gold that is nobody": (
        {"judge.gold": {}},
        "judge.gold: expected a gold judge, [[judge.gold.panel]], or episodes with labels",
    ),
    "gold without an address": (
        {"judge.gold": {"panel": [MEMBER, {"model": "better"}]}},
        "judge.gold: member 1: needs provider (or base_url), or python",
    ),
    "labels without episodes": (
        {"judge.gold": {"labels": "labels.jsonl"}},
        "judge.gold: expected both episodes and labels, or neither and a gold judge",
    ),
    "gold without the rubric": (
        {**SYNTH, "judge.gold": {"panel": [MEMBER]}},
        "judge.gold: a gold judge needs the rubric, which only services.judge_url has: give its file as "
        "judge.options.rubric_id",
    ),
    "labels and a judge": (
        {"judge.gold": {"labels": "l", "episodes": "e", "panel": [MEMBER]}},
        "judge.gold: episodes with labels are gold already, so panel has no effect: remove one",
    ),
}


# A value of every key that only a model obeys.
OF_A_MODEL: dict[str, Any] = {
    "provider": "openai",
    "model": "m",
    "base_url": "http://h/v1",
    "api_key_env": "KEY",
    "temperature": 0.5,
    "max_output_tokens": 7,
    "usd_per_million_tokens": [0.1, 0.4],
}


def test_every_key_of_a_judging_model_has_a_value_here() -> None:
    assert {*OF_A_MODEL, "python"} == set(JudgeModelSettings.model_fields)


@pytest.mark.parametrize("key", OF_A_MODEL)
def test_no_key_of_a_model_stands_beside_a_function(key: str, problems: Problems) -> None:
    given = {key: OF_A_MODEL[key]}
    gold = {"judge.gold": {"panel": [{"python": "mine:judge", **given}]}}
    panel = {**PANEL, "judge.panel": [MEMBER, {"python": "mine:judge", **given}]}
    assert problems(judged(gold)) == [f"judge.gold: member 0: python is no model, so {key} has no effect: remove one"]
    assert problems(judged(panel)) == [f"judge.panel: member 1: python is no model, so {key} has no effect: remove one"]
    (problem,) = problems(judged({**PYTHON, f"judge.options.{key}": given[key]}))
    assert problem.startswith(f"judge.options.{key}: ")


@pytest.mark.parametrize(("key", "value"), [("mode", "turn"), ("samples", 3)])
def test_what_only_models_are_asked_is_refused_of_a_panel_of_functions(
    key: str, value: Any, problems: Problems
) -> None:
    functions = {**PANEL, "judge.panel": [{"python": "mine:judge"}, {"python": "mine:other"}]}
    (problem,) = problems(judged({**functions, f"judge.options.{key}": value}))
    assert problem.startswith(f"judge.options.{key}: has no effect: ")


@pytest.mark.parametrize("name", REFUSED)
def test_a_contradiction_of_the_judge_names_the_fix(name: str, problems: Problems) -> None:
    changes, problem = REFUSED[name]
    assert problems(judged(changes)) == [problem]


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("base_url", "ftp://x", "expected a URL that begins with http:// or https:// and holds no user or password"),
        ("base_url", "http://me:pw@x/v1", "expected a URL that begins with http:// or https:// and holds no user or "
         "password"),
        ("api_key_env", "sk-1234", "expected the name of an environment variable, which holds the key"),
        ("python", "judge", 'expected "module:function", got \'judge\''),
        ("samples", 0, "expected an integer > 0, got 0"),
    ],
)  # fmt: skip
def test_a_wrong_value_of_an_option_is_named(key: str, value: Any, problem: str, problems: Problems) -> None:
    assert problems(judged({f"judge.options.{key}": value})) == [f"judge.options.{key}: {problem}"]


@pytest.mark.parametrize("name", ["task_app_origin_rewards_only", "rubric_rewards_only"])
def test_a_switch_between_rewards_must_agree_with_the_blend(name: str, problems: Problems) -> None:
    (problem,) = problems(judged({f"rollout.{name}": True}))
    others = {
        "task_app_origin_rewards_only": "judge.reward_blend.event = 0, judge.reward_blend.outcome = 0",
        "rubric_rewards_only": "judge.reward_blend.env = 0",
    }
    expected = f"true contradicts [judge.reward_blend]: set {others[name]}, or remove this"
    assert problem == f"rollout.{name}: {expected}"


def test_an_apps_own_rewards_need_no_judge_and_a_judges_do(make: Make, problems: Problems) -> None:
    config = make({"rollout.task_app_origin_rewards_only": True, "rollout.rubric_rewards_only": False})
    assert config == make({})
    assert problems({"rollout.rubric_rewards_only": True}) == [
        "rollout.rubric_rewards_only: true needs a judge: set judge.enabled = true, with its options"
    ]


ALLOWED: dict[str, dict[str, Any]] = {
    "as it is": {},
    "groups of two": {**GROUP, "training.group_size": 2},
    "a panel that compares groups": {**GROUP, **PANEL},
    "only the judge": {"judge.reward_blend": {"env": 0.0, "event": 0.0, "outcome": 1.0}},
    "only watched": {"judge.reward_blend": {"event": 0.0}},
    "switched off": {"judge.enabled": False, "judge.reward_blend": ..., "judge.gold": {}, **SYNTH},
    "the hosted judge": {"judge.type": "synth", **SYNTH, "judge.options.rubric_id": ...},
    "the hosted judge by its address": SYNTH,
    "a server of our own": {"judge.options.provider": "local", "judge.options.base_url": "http://127.0.0.1:8000/v1"},
    "an endpoint without a provider": {"judge.options.provider": ..., "judge.options.base_url": "http://h/v1"},
    "a function": PYTHON,
    "a panel": PANEL,
    "a rubric in the file": {
        "judge.options.rubric_id": ...,
        "judge.options.rubric_overrides": {"outcome": {"criteria": [{"id": "a", "description": "A."}]}},
    },
    "samples that differ": {"judge.options.samples": 3, "judge.options.temperature": 0.7},
    "a budget": {"judge.options.max_cost_usd": 1.0, "judge.options.usd_per_million_tokens": [0.1, 0.4]},
    "a gold judge": {"judge.gold": {"panel": [MEMBER]}},
    "several gold judges": {"judge.gold": {"panel": [MEMBER, {"python": "mine:judge"}]}},
    "labelled episodes": {"judge.gold": {"labels": "l", "episodes": "e"}},
}  # fmt: skip


@pytest.mark.parametrize("name", ALLOWED)
def test_just_inside_every_rule_of_the_judge_is_fine(name: str, make: Make, tmp_path: Any) -> None:
    config = make(judged(ALLOWED[name]))
    path = tmp_path / "resolved.toml"
    path.write_text(config.to_toml(), encoding="utf-8")
    assert load_config(path) == config


def test_a_member_of_a_panel_is_checked_as_strictly_as_a_section(problems: Problems) -> None:
    (problem,) = problems(judged({**PANEL, "judge.panel": [MEMBER, {"provider": "groq", "modl": "b"}]}))
    assert "unknown key; did you mean 'model'?" in problem


def test_a_key_is_named_by_its_variable_and_never_written() -> None:
    with pytest.raises(ConfigError, match="OPENAI_API_KEY") as caught:
        RunConfig.from_dict({"judge": {"panel": [{"openai_api_key": "sk-secret"}]}})
    assert "sk-secret" not in str(caught.value)
