"""Rules about the judge (its type, the keys that it needs, the weight of its scores), task apps and mixed batches."""

from __future__ import annotations

import ipaddress

from gspo_gym.config.nested import POLICY_CONFIG
from gspo_gym.config.record import Rule, RunRecord, default_of, idle, rule, rules_in, value_at
from gspo_gym.config.sections import PolicyConfigSection
from gspo_gym.config.words import show
from gspo_gym.errors import nearest_name
from gspo_gym.judge.settings import MAX_COMPARED, JudgeModelSettings, JudgeOptions, JudgeSettings

# The keys of a judge that only a model obeys.
_MODEL_KEYS = tuple(name for name in JudgeModelSettings.model_fields if name != "python")


def judge_kind(judge: JudgeSettings, judge_url: str | None) -> str:
    """Return the type of the judge: "synth", "python", "model", or "panel" for several, each of any type."""
    if judge.panel:
        return "panel"
    is_function = judge.options is not None and judge.options.python is not None
    return "synth" if judge_url is not None else "python" if is_function else "model"


def _kind(c: RunRecord) -> str:
    return judge_kind(c.judging, c.endpoints.judge_url)


def _options(c: RunRecord) -> JudgeOptions:
    return c.judging.options or JudgeOptions()


@rule("judge.reward_blend.env")
def _blend_is_not_zero(c: RunRecord) -> str | None:
    blend = c.judging.blend
    if blend.env > 0 or blend.event or blend.outcome:
        return None
    return "expected one weight > 0 at least, got env = event = outcome = 0"


def _is_judged(part: str) -> Rule:
    def check(c: RunRecord) -> str | None:
        weight, is_judged = getattr(c.judging.blend, part), getattr(_options(c), part)
        if weight and c.judging.enabled and not is_judged:
            return f"expected 0 while judge.options.{part} is not true, got {weight:g}: set that to true, or this to 0"
        return None

    return Rule(f"judge.reward_blend.{part}", check)


@rule("judge.enabled")
def _judge_is_complete(c: RunRecord) -> str | None:
    options = _options(c)
    if not c.judging.enabled:
        return None
    missing = []
    if _kind(c) == "model":
        values = (("provider", options.provider or options.base_url), ("model", options.model))
        missing += [name for name, value in values if value is None]
    if not options.event and not options.outcome:
        missing.append("event or outcome = true")
    if not missing:
        return None
    no_options = "" if c.judging.options is not None else ", and has no options at all"
    return f"true needs judge.options with {', '.join(missing)}{no_options}"


@rule("judge.enabled")
def _scores_weigh(c: RunRecord) -> str | None:
    if not c.judging.enabled or c.judging.reward_blend is not None:
        return None
    # Calls would be paid for that nothing learns from.
    return (
        "true, but without judge.reward_blend the judge's scores weigh 0; give it, such as { env = 0.2, event = 0.4, "
        "outcome = 0.4 } (or event = 0.0, if the judge is only to be watched)"
    )


@rule("judge.enabled")
def _has_a_rubric(c: RunRecord) -> str | None:
    options = _options(c)
    is_there = options.rubric_id or options.rubric_overrides
    # The judge at services.judge_url may have rubrics of its own.
    if not c.judging.enabled or is_there or _kind(c) == "synth":
        return None
    return (
        "true needs a rubric: judge.options.rubric_id (a file, or an id such as support_desk/bundle@v1) or "
        "rubric_overrides"
    )


def _needs_a_rubric_here(name: str) -> Rule:
    # The judge at services.judge_url knows the rubric by its id: there is no rubric here to change.
    def check(c: RunRecord) -> str | None:
        rubric_id = _options(c).known_rubric
        if not getattr(_options(c), name) or rubric_id is None or _kind(c) != "synth":
            return None
        return (
            f"has no effect on the rubric {show(rubric_id)}, which the judge at services.judge_url knows by its id: "
            "remove this, or give the file as judge.options.rubric_id"
        )

    return Rule(f"judge.options.{name}", check)


def _model_key_is_used(name: str) -> Rule:
    """Return the rule that a key about the judging model needs a judge that is a model."""
    key = f"judge.options.{name}"

    def check(c: RunRecord) -> str | None:
        kind = _kind(c)
        if value_at(c, key) in (None, default_of(key)) or kind == "model":
            return None
        # A judge behind a URL is told which model to ask, and with which key, but not how.
        if kind == "synth" and name in ("provider", "model", "api_key_env"):
            return None
        why = {
            "synth": "the judge at services.judge_url has its own",
            "python": "judge.options.python is no model",
            "panel": "the members of [[judge.panel]] have their own",
        }[kind]
        return f"has no effect: {why}; remove this"

    return Rule(key, check)


def _keys_of_a_model(judge: JudgeModelSettings) -> list[str]:
    """Return the keys with a value that only a model obeys."""
    defaults = {name: JudgeModelSettings.model_fields[name].default for name in _MODEL_KEYS}
    return [name for name, default in defaults.items() if getattr(judge, name) not in (None, default)]


# Returns what is missing or too much in the settings of one judge of a panel.
def _is_one_judge(judge: JudgeModelSettings, name: str) -> str | None:
    keys = _keys_of_a_model(judge)
    if judge.python is not None:
        return f"{name}: python is no model, so {keys[0]} has no effect: remove one" if keys else None
    missing = [] if judge.model else ["model"]
    missing += [] if judge.provider or judge.base_url else ["provider (or base_url)"]
    if judge.provider == "local" and not judge.base_url:
        missing.append("base_url, because local has none of its own")
    return f"{name}: needs {' and '.join(missing)}, or python" if missing else None


@rule("judge.panel")
def _panel_is_complete(c: RunRecord) -> str | None:
    panel = c.judging.panel
    if len(panel) == 1:
        return "expected two judges at least, got one: write it into [judge.options]"
    for number, judge in enumerate(panel):
        if problem := _is_one_judge(judge, f"member {number}"):
            return problem
    return None


@rule("judge.gold")
def _gold_is_complete(c: RunRecord) -> str | None:
    gold = c.judging.gold
    if gold is None or not c.judging.enabled:
        return None
    if (gold.episodes is None) != (gold.labels is None):
        return "expected both episodes and labels, or neither and a gold judge"
    if gold.episodes is not None:
        return "episodes with labels are gold already, so panel has no effect: remove one" if gold.panel else None
    if not gold.panel:
        return "expected a gold judge, [[judge.gold.panel]], or episodes with labels"
    return next(filter(None, map(_is_one_judge, gold.panel, (f"member {n}" for n in range(len(gold.panel))))), None)


@rule("judge.gold")
def _gold_has_a_rubric(c: RunRecord) -> str | None:
    gold, options = c.judging.gold, _options(c)
    if gold is None or not c.judging.enabled or gold.episodes or options.rubric_file or options.rubric_overrides:
        return None
    if _kind(c) != "synth":
        return None
    return "a gold judge needs the rubric, which only services.judge_url has: give its file as judge.options.rubric_id"


@rule("judge.options.provider")
def _local_has_url(c: RunRecord) -> str | None:
    is_elsewhere = c.endpoints.judge_url is not None
    return None if is_elsewhere or _options(c).provider is None else _options(c).url_problem()


@rule("judge.options.max_cost_usd")
def _cost_has_prices(c: RunRecord) -> str | None:
    # A function costs nothing.
    judges = [judge for judge in c.judging.panel or (_options(c),) if judge.python is None]
    is_known = all(judge.usd_per_million_tokens is not None for judge in judges)
    if _options(c).max_cost_usd is None or is_known:
        return None
    return "needs prices: give usd_per_million_tokens of every model, or limit max_calls instead"


@rule("judge.options.samples")
def _samples_differ(c: RunRecord) -> str | None:
    options = _options(c)
    # The members of a panel differ by themselves.
    if options.samples == 1 or options.temperature or c.judging.panel:
        return None
    return f"{options.samples} samples at judge.options.temperature = 0 are one and the same: raise that, or set 1"


@rule("judge.options.weights")
def _weights_are_of_tracks(c: RunRecord) -> str | None:
    options = _options(c)
    other_tracks = sorted(set(options.weights) - set(options.tracks))
    if not options.tracks or not other_tracks:
        return None
    return (
        f"{show(other_tracks[0])} is not in judge.options.tracks = {show(list(options.tracks))}, so that its weight "
        "has no effect"
    )


@rule("judge.options.mode")
def _groups_can_be_compared(c: RunRecord) -> str | None:
    options, size = _options(c), c.training.group_size
    if options.mode != "group" or not c.judging.enabled:
        return None
    if options.event:
        return '"group" compares whole episodes: set judge.options.event = false and judge.reward_blend.event = 0'
    if any(judge.python is not None for judge in c.judging.panel):
        return '"group" asks models alone: remove the python member of [[judge.panel]], or set this to "auto"'
    if not 2 <= size <= MAX_COMPARED:
        return f'"group" compares 2 to {MAX_COMPARED} episodes in a call: training.group_size is {size}'
    if c.judging.gold is not None:
        return (
            '"group" gives scores within a group, whose mean says nothing beside gold: remove [judge.gold], and '
            'compare by `gspo-gym judge audit`, or set this to "auto"'
        )
    return None


def _asks_a_model(c: RunRecord) -> bool:
    panel = c.judging.panel
    return any(judge.python is None for judge in panel) if panel else _kind(c) == "model"


JUDGE_RULES = (
    *rules_in(globals()),
    *map(_is_judged, ("event", "outcome")),
    *map(_model_key_is_used, _MODEL_KEYS),
    *(
        idle(f"judge.options.{name}", _asks_a_model, f"has no effect: {advice}; remove this")
        for name, advice in (
            ("mode", "only a model is asked by turns or by groups"),
            ("samples", "only models are asked for several samples"),
        )
    ),
    idle(
        "services.judge_url",
        lambda c: not c.judging.panel,
        "has no effect beside [[judge.panel]], whose members are models and functions: remove one",
    ),
    idle(
        "judge.options.python",
        lambda c: not (c.endpoints.judge_url or c.judging.panel),
        "has no effect beside services.judge_url or [[judge.panel]]: remove one of them",
    ),
)


# Keys of policy.config that the trainer sets for each rollout; those of rollout.policy_config are overwritten.
APP_KEYS_SAID_FOR_EACH_ROLLOUT = ("model", "inference_url", "trace_correlation_id")


@rule("rollout.policy_config")
def _other_keys_have_a_reader(c: RunRecord) -> str | None:
    unknown_keys = {} if c.rollout.policy_config is None else c.rollout.policy_config.others
    if not unknown_keys or c.has_app:
        return None
    name, known_keys = next(iter(unknown_keys)), [*PolicyConfigSection.model_fields, *POLICY_CONFIG]
    return f"{name}: unknown key; {nearest_name(name, known_keys)} (only a task app has others)"


@rule("rollout.mixture")
def _shares_leave_some(c: RunRecord) -> str | None:
    total = sum(entry.share for entry in c.rollout.mixture)
    if total < 1:
        return None
    return f"expected shares below 1 in sum, got {total:g}: rollout.env_name gets the rest, and must get some"


@rule("rollout.mixture")
def _keys_are_of_apps(c: RunRecord) -> str | None:
    for number, entry in enumerate(c.rollout.mixture):
        if entry.api_key_env and not entry.task_url:
            return f"api_key_env of entry {number} has no effect without a task_url there: give it, or remove this"
    return None


@rule("gateway.address")
def _apps_can_call(c: RunRecord) -> str | None:
    # The gateway's URL is made of its host; other addresses than "any" can be called as they are.
    if c.gateway is None or c.gateway.public_url is not None or not _is_any_address(c.gateway.host):
        return None
    return f"{show(c.gateway.host)} is every address of this machine, and none to call: give gateway.public_url, too"


def _is_any_address(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return False


def _is_played_here(c: RunRecord) -> bool:
    # Demonstrations of [warmup] are made here, even if apps play all episodes.
    return c.warmup is not None or any(source.task_url is None for source in c.sources)


APP_RULES = (
    *(one for one in rules_in(globals()) if one not in JUDGE_RULES),
    idle(
        "gateway",
        lambda c: c.has_app,
        "has no effect without a task app: give services.task_url, or remove this section",
    ),
    *(
        idle(
            f"rollout.{name}",
            _is_played_here,
            f"has no effect where task apps play all episodes: set {show(default_of(f'rollout.{name}'))}",
        )
        for name in ("isolation", "env_memory_limit_mb", "env_variables")
    ),
)
