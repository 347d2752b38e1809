"""Rules about the judge (its type, the keys that it needs, the weight of its scores), task apps and mixed batches."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

from gspo_gym.config.rules.objective import OTHER_KEYS, Rule, default_of, no_effect
from gspo_gym.config.sections import PolicyConfigSection
from gspo_gym.config.words import show
from gspo_gym.env.workers.limits import IsolationSettings
from gspo_gym.errors import nearest_name
from gspo_gym.judge.settings import GoldSettings, JudgeModelSettings, JudgeOptions

# The keys that decide the type of the judge; rules that need it take their values as `*kind`.
_KIND_KEYS = ("judge.type", "services.judge_url", "judge.options.python", "judge.panel")

# The keys of a judge that only a model obeys.
_MODEL_KEYS = tuple(name for name in JudgeModelSettings.model_fields if name != "python")


def judge_kind(kind: str | None, judge_url: str | None, python: str | None, panel: Sequence[Any] | None) -> str:
    """Return the type of the judge: "synth", "python", "model", or "panel" for several, each of any type."""
    # Several judges have no type of their own. Without judge.type the other keys decide, as in the hosted trainer.
    if panel:
        return "panel"
    if kind is not None:
        return kind
    return "synth" if judge_url is not None else "python" if python is not None else "model"


def _blend_is_not_zero(env: float | None, event: float | None, outcome: float | None) -> str | None:
    if env is None or env > 0 or event or outcome:
        return None
    return "expected one weight > 0 at least, got env = event = outcome = 0"


def _is_judged(part: str) -> Rule:
    def check(weight: float | None, enabled: bool | None, is_judged: bool | None) -> str | None:
        if weight and enabled and not is_judged:
            return f"expected 0 while judge.options.{part} is not true, got {weight:g}: set that to true, or this to 0"
        return None

    return Rule((f"judge.reward_blend.{part}", "judge.enabled", f"judge.options.{part}"), check)


def _judge_is_complete(
    enabled: bool | None,
    has_options: bool,
    event: bool | None,
    outcome: bool | None,
    provider: str | None,
    model: str | None,
    base_url: str | None,
    *kind: Any,
) -> str | None:
    if not enabled:
        return None
    missing = []
    if judge_kind(*kind) == "model":
        missing += [name for name, value in (("provider", provider or base_url), ("model", model)) if value is None]
    if not event and not outcome:
        missing.append("event or outcome = true")
    if not missing:
        return None
    return f"true needs judge.options with {', '.join(missing)}" + (
        "" if has_options else ", and has no options at all"
    )


def _scores_weigh(enabled: bool | None, has_blend: bool) -> str | None:
    if not enabled or has_blend:
        return None
    # Calls would be paid for that nothing learns from.
    return (
        "true, but without judge.reward_blend the judge's scores weigh 0; give it, such as { env = 0.2, event = 0.4, "
        "outcome = 0.4 } (or event = 0.0, if the judge is only to be watched)"
    )


def _has_a_rubric(
    enabled: bool | None,
    rubric_file: str | None,
    rubric_id: str | None,
    overrides: Mapping[str, Any] | None,
    *kind: Any,
) -> str | None:
    # The judge at services.judge_url may have rubrics of its own.
    if not enabled or rubric_file or rubric_id or overrides or judge_kind(*kind) == "synth":
        return None
    return (
        "true needs a rubric: judge.options.rubric_file, rubric_id (such as support_desk/bundle@v1) or rubric_overrides"
    )


def _one_rubric(rubric_file: str | None, rubric_id: str | None) -> str | None:
    if rubric_file is None or rubric_id is None:
        return None
    return f"is given, and judge.options.rubric_id = {show(rubric_id)}, too: remove one of them"


def _needs_a_rubric_here(name: str) -> Rule:
    # The judge at services.judge_url knows the rubric by its id: there is no rubric here to change.
    def check(value: Any, rubric_id: str | None, *kind: Any) -> str | None:
        if not value or rubric_id is None or judge_kind(*kind) != "synth":
            return None
        return (
            f"has no effect on the rubric {show(rubric_id)}, which the judge at services.judge_url knows by its id: "
            "remove this, or give judge.options.rubric_file in place of rubric_id"
        )

    return Rule((f"judge.options.{name}", "judge.options.rubric_id", *_KIND_KEYS), check)


def _type_agrees(
    kind: str | None, judge_url: str | None, python: str | None, panel: Sequence[Any] | None
) -> str | None:
    if kind == "synth" and judge_url is None:
        return (
            '"synth" needs services.judge_url, where that judge answers; for a model behind an OpenAI-compatible '
            "endpoint leave this out"
        )
    if kind is not None and panel:
        return f"{show(kind)} is one judge, but [[judge.panel]] has several: leave this out"
    if kind == "python" and python is None:
        return '"python" needs judge.options.python, the function'
    if kind in ("model", "python") and judge_url is not None:
        return f'{show(kind)} asks no services.judge_url: remove that, or set this to "synth"'
    return None


def _url_is_used(url: str | None, panel: Sequence[Any] | None) -> str | None:
    if url is None:
        return None
    return "has no effect beside [[judge.panel]], whose members are models and functions: remove one" if panel else None


def _model_key_is_used(name: str) -> Rule:
    """Return the rule that a key about the judging model needs a judge that is a model."""
    default = default_of(JudgeModelSettings, name)

    def check(value: Any, *kind: Any) -> str | None:
        if value is None or value == default:
            return None
        asked = judge_kind(*kind)
        # A judge behind a URL is told which model to ask, and with which key, but not how.
        if asked == "model" or (asked == "synth" and name in ("provider", "model", "api_key_env")):
            return None
        who = {
            "synth": "the judge at services.judge_url has its own",
            "python": "judge.options.python is no model",
            "panel": "the members of [[judge.panel]] have their own",
        }[asked]
        return f"has no effect: {who}; remove this"

    return Rule((f"judge.options.{name}", *_KIND_KEYS), check)


def _python_is_alone(python: str | None, kind: str | None, judge_url: str | None, panel: Any) -> str | None:
    if python is None or not (judge_url or panel or kind == "synth"):
        return None
    return "has no effect beside services.judge_url or [[judge.panel]]: remove one of them"


def _option_needs(name: str, kinds: tuple[str, ...], advice: str) -> Rule:
    default = default_of(JudgeOptions, name)

    def check(value: Any, *kind: Any) -> str | None:
        if value is None or value == default:
            return None
        asked, panel = judge_kind(*kind), kind[_KIND_KEYS.index("judge.panel")]
        if asked == "panel" and all(member.get("python") is not None for member in panel):
            asked = "python"
        return None if asked in kinds else f"has no effect: {advice}; remove this"

    return Rule((f"judge.options.{name}", *_KIND_KEYS), check)


def _keys_of_a_model(settings: Mapping[str, Any]) -> list[str]:
    """Return the keys with a value that only a model obeys."""
    defaults = {name: default_of(JudgeModelSettings, name) for name in _MODEL_KEYS}
    return [name for name, default in defaults.items() if settings.get(name) not in (None, default)]


# Returns what is missing or too much in the settings of one judge: of a panel, or the gold judge.
def _is_one_judge(settings: Mapping[str, Any], name: str) -> str | None:
    given = _keys_of_a_model(settings)
    if settings.get("python") is not None:
        return f"{name}: python is no model, so {given[0]} has no effect: remove one" if given else None
    missing = [] if settings.get("model") else ["model"]
    missing += [] if settings.get("provider") or settings.get("base_url") else ["provider (or base_url)"]
    if settings.get("provider") == "local" and not settings.get("base_url"):
        missing.append("base_url, because local has none of its own")
    return f"{name}: needs {' and '.join(missing)}, or python" if missing else None


def _panel_is_complete(panel: Sequence[Mapping[str, Any]] | None) -> str | None:
    if not panel:
        return None
    if len(panel) == 1:
        return "expected two judges at least, got one: write it into [judge.options]"
    for number, entry in enumerate(panel):
        if problem := _is_one_judge(entry, f"member {number}"):
            return problem
        if entry.get("temperature") is not None and entry.get("send_temperature") is False:
            return f"member {number}: temperature has no effect with send_temperature = false: remove one of them"
    return None


def _gold_is_complete(
    has_gold: bool, enabled: bool | None, episodes: str | None, labels: str | None, *judge: Any
) -> str | None:
    if not has_gold or not enabled:
        return None
    settings = dict(zip(JudgeModelSettings.model_fields, judge, strict=True))
    if (episodes is None) != (labels is None):
        return "expected both episodes and labels, or neither and a gold judge"
    if episodes is None:
        return _is_one_judge(settings, "gold")
    if given := [*_keys_of_a_model(settings), *(["python"] if settings["python"] is not None else [])]:
        return f"episodes with labels are gold already, so {given[0]} has no effect: remove one"
    return None


def _gold_has_a_rubric(
    has_gold: bool,
    enabled: bool | None,
    episodes: str | None,
    rubric_file: str | None,
    overrides: Mapping[str, Any] | None,
    *kind: Any,
) -> str | None:
    if not has_gold or not enabled or episodes or rubric_file or overrides or judge_kind(*kind) != "synth":
        return None
    return "a gold judge needs the rubric, which only services.judge_url has: give judge.options.rubric_file"


def _local_has_url(provider: str | None, base_url: str | None, kind: str | None, judge_url: str | None) -> str | None:
    if provider != "local" or base_url is not None or kind == "synth" or judge_url is not None:
        return None
    return '"local" needs judge.options.base_url, such as "http://127.0.0.1:8000/v1"'


def _cost_has_prices(
    max_cost: float | None, price_in: float | None, price_out: float | None, panel: Sequence[Mapping[str, Any]] | None
) -> str | None:
    names = ("usd_per_million_input_tokens", "usd_per_million_output_tokens")
    own = dict(zip(names, (price_in, price_out), strict=True))
    # A function costs nothing.
    judges = [judge for judge in panel or (own,) if judge.get("python") is None]
    if max_cost is None or all(judge.get(name) is not None for judge in judges for name in names):
        return None
    return f"needs prices: give {' and '.join(names)} of every model, or limit max_calls instead"


def _samples_differ(samples: int | None, temperature: float | None, is_sent: bool | None, panel: Any) -> str | None:
    # An endpoint that is sent no temperature samples at its own.
    if samples is None or samples == 1 or (temperature or 0.0) > 0 or not is_sent or panel:
        return None
    return f"{samples} samples at judge.options.temperature = 0 are one and the same: raise that, or set 1"


def _aggregates_several(aggregate: str | None, samples: int | None, panel: Any) -> str | None:
    if aggregate is None or aggregate == "mean" or panel or (samples or 1) > 1:
        return None
    return f"{show(aggregate)} of one judge and one sample has no effect: remove this"


def _weights_are_of_tracks(weights: Mapping[str, float] | None, tracks: tuple[str, ...] | None) -> str | None:
    others = sorted(set(weights or {}) - set(tracks or ()))
    if not tracks or not others:
        return None
    return f"{show(others[0])} is not in judge.options.tracks = {show(list(tracks))}, so that its weight has no effect"


_ASKED_HERE = ("model", "panel")  # kinds of judges whose prompt is written here

JUDGE_RULES = (
    Rule(("judge.reward_blend.env", "judge.reward_blend.event", "judge.reward_blend.outcome"), _blend_is_not_zero),
    _is_judged("event"),
    _is_judged("outcome"),
    Rule(
        (
            "judge.enabled",
            "judge.options",
            "judge.options.event",
            "judge.options.outcome",
            "judge.options.provider",
            "judge.options.model",
            "judge.options.base_url",
            *_KIND_KEYS,
        ),
        _judge_is_complete,
    ),
    Rule(("judge.enabled", "judge.reward_blend"), _scores_weigh),
    Rule(
        (
            "judge.enabled",
            "judge.options.rubric_file",
            "judge.options.rubric_id",
            "judge.options.rubric_overrides",
            *_KIND_KEYS,
        ),
        _has_a_rubric,
    ),
    Rule(("judge.options.rubric_file", "judge.options.rubric_id"), _one_rubric),
    *(_needs_a_rubric_here(name) for name in ("rubric_aggregate", "rubric_folder")),
    Rule(_KIND_KEYS, _type_agrees),
    Rule(("services.judge_url", "judge.panel"), _url_is_used),
    Rule(("judge.options.python", "judge.type", "services.judge_url", "judge.panel"), _python_is_alone),
    *map(_model_key_is_used, _MODEL_KEYS),
    _option_needs("mode", _ASKED_HERE, "only a model is asked turn by turn"),
    _option_needs("max_transcript_chars", _ASKED_HERE, "only for a model an episode is written out"),
    _option_needs("samples", _ASKED_HERE, "only models are asked for several samples"),
    Rule(("judge.panel",), _panel_is_complete),
    Rule(
        (
            "judge.gold",
            "judge.enabled",
            "judge.gold.episodes",
            "judge.gold.labels",
            *(f"judge.gold.{name}" for name in JudgeModelSettings.model_fields),
        ),
        _gold_is_complete,
    ),
    Rule(
        (
            "judge.gold",
            "judge.enabled",
            "judge.gold.episodes",
            "judge.options.rubric_file",
            "judge.options.rubric_overrides",
            *_KIND_KEYS,
        ),
        _gold_has_a_rubric,
    ),
    no_effect(
        "judge.gold.num_episodes",
        GoldSettings.model_fields["num_episodes"].default,
        "judge.gold.labels",
        lambda labels: labels is None,
        "all labelled episodes are scored",
    ),
    Rule(("judge.options.provider", "judge.options.base_url", "judge.type", "services.judge_url"), _local_has_url),
    Rule(
        (
            "judge.options.max_cost_usd",
            "judge.options.usd_per_million_input_tokens",
            "judge.options.usd_per_million_output_tokens",
            "judge.panel",
        ),
        _cost_has_prices,
    ),
    Rule(
        # The members of a panel differ by themselves.
        ("judge.options.samples", "judge.options.temperature", "judge.options.send_temperature", "judge.panel"),
        _samples_differ,
    ),
    *(
        no_effect(f"judge.{who}.temperature", None, f"judge.{who}.send_temperature", bool, "have it sent")
        for who in ("options", "gold")
    ),
    Rule(("judge.options.aggregate", "judge.options.samples", "judge.panel"), _aggregates_several),
    Rule(("judge.options.weights", "judge.options.tracks"), _weights_are_of_tracks),
)


# Keys of policy.config that the trainer sets for each rollout; those of rollout.policy_config are overwritten.
APP_KEYS_SAID_FOR_EACH_ROLLOUT = ("model", "inference_url", "trace_correlation_id")

_SOURCES = ("services.task_url", "rollout.mixture")
Entries = Sequence[Mapping[str, Any]]  # of rollout.mixture, as read


def _shares_leave_some(mixture: Entries) -> str | None:
    total = sum(entry["share"] for entry in mixture)
    if total < 1:
        return None
    return f"expected shares below 1 in sum, got {total:g}: rollout.env_name gets the rest, and must get some"


def has_app(task_url: str | None, mixture: Entries) -> bool:
    """Return whether a task app plays a part of the episodes."""
    return task_url is not None or any(entry.get("task_url") for entry in mixture)


def _keys_are_of_apps(mixture: Entries) -> str | None:
    for number, entry in enumerate(mixture):
        if entry.get("api_key_env") and not entry.get("task_url"):
            return f"api_key_env of entry {number} has no effect without a task_url there: give it, or remove this"
    return None


def _other_keys_have_a_reader(others: Mapping[str, Any] | None, task_url: str | None, mixture: Entries) -> str | None:
    if not others or has_app(task_url, mixture):
        return None
    name = next(iter(others))
    return f"{name}: unknown key; {nearest_name(name, PolicyConfigSection.model_fields)} (only a task app has others)"


def _gateway_has_an_app(is_given: bool, task_url: str | None, mixture: Entries) -> str | None:
    if not is_given or has_app(task_url, mixture):
        return None
    return "has no effect without a task app: give services.task_url, or remove this section"


def _schemas_come_from_an_app(
    is_obeyed: bool | None, min_tokens: int, task_url: str | None, mixture: Entries
) -> str | None:
    if not is_obeyed:
        return None
    if not has_app(task_url, mixture):
        return "has no effect without a task app, which alone asks for schemas: give services.task_url, or remove this"
    if min_tokens:
        return f"knows the model's own end tokens, which rollout.min_output_tokens = {min_tokens} would withhold: set 0"
    return None


def _apps_can_call(host: str | None, public_url: str | None) -> str | None:
    # The gateway's URL is made of its host; other addresses than "any" can be called as they are.
    if host is None or public_url is not None or not _is_any_address(host):
        return None
    return f"{show(host)} is every address of this machine, and none to call: give gateway.public_url, too"


def _is_any_address(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return False


def _of_environments_here(name: str) -> Rule:
    default = default_of(IsolationSettings, name)

    def check(value: Any, task_url: str | None, mixture: Entries, has_warmup: bool) -> str | None:
        # Demonstrations of [warmup] are made here, even if apps play all episodes.
        is_played_here = task_url is None or has_warmup or any(not entry.get("task_url") for entry in mixture)
        if is_played_here or value == default:
            return None
        return f"has no effect where task apps play all episodes: set {show(default)}"

    return Rule((f"rollout.{name}", *_SOURCES, "warmup"), check)


APP_RULES = (
    Rule((f"rollout.policy_config{OTHER_KEYS}", *_SOURCES), _other_keys_have_a_reader),
    Rule(("rollout.mixture",), _shares_leave_some),
    Rule(("rollout.mixture",), _keys_are_of_apps),
    Rule(("gateway", *_SOURCES), _gateway_has_an_app),
    Rule(("vllm.structured_output", "rollout.min_output_tokens", *_SOURCES), _schemas_come_from_an_app),
    Rule(("gateway.host", "gateway.public_url"), _apps_can_call),
    *(_of_environments_here(name) for name in ("isolation", "env_memory_limit_mb", "env_variables")),
)
