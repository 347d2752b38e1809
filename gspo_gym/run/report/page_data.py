"""The page of a run: one HTML file that asks for nothing over the network, and the JSON values that it shows.

`run_values` is the run at a glance and its curves; `step_values` is one file of episodes, token by token. The saved
page holds both; the live one asks for them as they are needed, and for the tokens of one group at a time. Numbers that
a record has as null stay null: a page must not show 0 where nothing was measured.

Data are compressed JSON, which the browser unpacks; nothing of a run becomes markup or script. The content security
policy allows the two blocks that are written here, by their digests, and nothing else. Curves are drawn by uPlot, which
is in the file with its licence.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import takewhile
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from gspo_gym.errors import RecordError
from gspo_gym.judge.records import JUDGEMENTS_FILE, JudgedEpisode, latest_judgements, read_judgements
from gspo_gym.learning.tokens import PASS_COLUMNS, Clip, Column, Fate
from gspo_gym.rollout.episode_files import episode_paths, read_episodes
from gspo_gym.run.recording import METRICS
from gspo_gym.run.records import read_config, read_events, read_metrics, read_teacher, teacher_text
from gspo_gym.run.registry import read_run
from gspo_gym.run.report.token_text import TokenTexts
from gspo_gym.run.tokens import TokenFile, open_tokens, token_path
from gspo_gym.types import SAMPLING_NAMES, Trajectory

Json = Any  # the values of json.loads
# A curve has at most this many points on the page: more than a screen has columns.
MAX_POINTS = 2000
_MAX_EVENT_CHARS = 300
_MAX_OPENING = 80  # characters of a task that name it
# What is looked at first, in this order; docs/tutorials/reading_a_run.md says what for.
KEY_CURVES = (
    "rollout/reward_mean",
    "rollout/success_rate",
    "batch/constant_group_fraction",
    "ratio/mean",
    "clip/low_fraction",
    "clip/high_fraction",
    "policy/entropy",
    "kl/rollout_max_gap",
    "loss/total",
    "optim/grad_norm",
    "rollout/tokens_per_turn",
)


def run_values(folder: Path) -> dict[str, Json]:
    """Return the run at a glance, its curves, its evaluations and its events.

    Raises:
        RecordError: a file of the run is damaged.
    """
    config = read_config(folder, "model")
    events, teacher = read_events(folder), read_teacher(folder)
    return {
        "run": read_run(folder).to_dict() | {"label": config["model"].get("label", folder.name)},
        "about": _about(config) | ({} if teacher is None else {"teacher": teacher_text(teacher)}),
        "rules": _rules(config),
        "metrics": _metrics(read_metrics(folder)),
        "evaluations": [_evaluation(event) for event in events if event["kind"] == "evaluation"],
        "events": [_event(event) for event in events if event["kind"] != "evaluation"],
        "steps": [path.name.partition(".")[0] for path in episode_paths(folder)],
    }


def step_values(folder: Path, name: str, *, max_episodes: int | None = None) -> dict[str, Json]:
    """Return one file of episodes, in groups of the same task, with the text of every token.

    Args:
        folder: of the run.
        name: of the file without its endings, such as "step_000012" or "eval_000010".
        max_episodes: groups are left out, the last first, until no more episodes are left; None: all.

    Raises:
        RecordError: there is no such file, or it is damaged.
    """
    step = RecordedStep(folder, name)
    values = step.outline(max_episodes)
    values["vocabulary"] = {}
    for number, group in enumerate(values["groups"]):
        full_group = step.group(number)
        values["vocabulary"] |= full_group["vocabulary"]
        for outline, episode in zip(group["episodes"], full_group["episodes"], strict=True):
            outline |= episode
    return values


class RecordedStep:
    """One file of episodes, which is read once: its outline, and its groups token by token.

    Raises:
        RecordError: there is no such file, or it is damaged.
    """

    def __init__(self, folder: Path, name: str) -> None:
        paths = [path for path in episode_paths(folder, name) if path.name.partition(".")[0] == name]
        if not paths:
            raise RecordError(f"{folder}: has no episodes {name!r}")
        self._folder, self._name = folder, name
        self._step = int(name.rpartition("_")[2]) if name[-1].isdigit() else 0
        is_of_training = name.startswith("step_")
        is_recorded = is_of_training and token_path(folder, self._step).exists()
        self._tokens = open_tokens(folder, self._step) if is_recorded else None
        self._judgements = latest_judgements(read_judgements(folder / JUDGEMENTS_FILE))
        # A task that comes twice in a training step has two groups, which were not compared with each other.
        groups: dict[tuple[str, str], list[Trajectory]] = defaultdict(list)
        for trajectory in read_episodes(paths[0]):
            groups[trajectory.group_id if is_of_training else "", trajectory.task.task_id].append(trajectory)
        self._groups = list(groups.values())

    def outline(self, max_episodes: int | None = None) -> dict[str, Json]:
        """Return what lists, filters and scales of colour need, without the tokens; `max_episodes` as `step_values`."""
        num_groups = 0
        num_shown = 0
        for members in self._groups:
            if max_episodes is not None and num_shown + len(members) > max(max_episodes, len(members)):
                break
            num_groups, num_shown = num_groups + 1, num_shown + len(members)
        columns = None if self._tokens is None else self._tokens.columns()
        metrics = next((line for line in read_metrics(self._folder) if line["step"] == self._step), {})
        return {
            "name": self._name,
            "step": self._step,
            "num_episodes": sum(map(len, self._groups)),
            "num_passes": 1 if self._tokens is None else self._tokens.num_passes,
            "loss": None if self._tokens is None else metrics.get("loss/total"),
            "update": None if columns is None else self._update(columns, metrics.get("optim/num_steps")),
            "names": {
                "clip": [member.name.lower() for member in Clip],
                "fate": [member.name.lower() for member in Fate],
            },
            "scales": _scales(columns, [member for members in self._groups for member in members]),
            "groups": [
                {
                    "task": members[0].task.task_id,
                    "environment": members[0].task.env_id,
                    "options": dict(members[0].task.options),
                    "opening": opening,
                    "episodes": [self._outline_of(member, columns) for member in members],
                }
                for members, opening in zip(self._groups[:num_groups], _openings(self._groups), strict=False)
            ],
        }

    def group(self, number: int) -> dict[str, Json]:
        """Return the episodes of a group token by token, and the text of each token id in them.

        A segment's `texts` are those of tokens which read otherwise in their place than alone, by their position.
        Without a tokenizer in the run there are no texts.

        Raises:
            RecordError: there is no such group.
        """
        if not 0 <= number < len(self._groups):
            raise RecordError(f"{self._name}: has no group {number}")
        members = self._groups[number]
        episodes = [
            _turns(member, self._judgement_of(member), leaves) | _columns(member, self._tokens)
            for member, leaves in zip(members, _divergences(members), strict=True)
        ]
        vocabulary: dict[int, str] = {}
        if (tokenizer := run_tokenizer(self._folder)) is not None:
            texts = TokenTexts(tokenizer)
            for segment in (segment for episode in episodes for segment in episode["segments"]):
                vocabulary |= {i: texts.alone(i) for i in segment["ids"]}
                # Of tokens that hold parts of characters: what they are beside their neighbours.
                token_texts = zip(segment["ids"], texts.in_sequence(segment["ids"]), strict=True)
                segment["texts"] = {at: text for at, (i, text) in enumerate(token_texts) if text != vocabulary[i]}
        return {"episodes": episodes, "vocabulary": vocabulary}

    def _update(self, columns: Mapping[str, Column], num_steps: float | None) -> dict[str, Json]:
        """Return what the shares of the loss are divided by, counted over all episodes: the page may show fewer.

        `episodes`, `turns` and `tokens` are lists by optimizer step, of those with sampled tokens; `taught` are the
        tokens of which a teacher that compares the sampled ones says something.
        """
        assert self._tokens is not None, "columns are of tokens"
        steps = columns["optimizer_step"]  # [P, N]
        counts = np.zeros((4, int(steps.max(initial=-1)) + 1), np.int64)
        own = dict(zip(self._tokens.spans, steps.T, strict=True))
        is_taught = np.isfinite(columns["teacher_log_ratio"])
        for trajectory in (member for members in self._groups for member in members if member.trajectory_id in own):
            turns = {int(i) for segment in trajectory.segments for i in segment.turn_index[segment.action_mask]}
            num_taught = int(is_taught[slice(*self._tokens.spans[trajectory.trajectory_id])].sum())
            for number in own[trajectory.trajectory_id]:
                if turns and number >= 0:
                    counts[:, number] += (1, len(turns), trajectory.num_actions, num_taught)
        return {
            "num_steps": num_steps,
            "shares": _sum(columns["share"]),
            "share_sizes": _sum(np.abs(columns["share"])),
            "batch_tokens": int((columns["fate"] <= Fate.OVERLONG).sum()),
            **dict(zip(("episodes", "turns", "tokens", "taught"), counts.tolist(), strict=True)),
        }

    def _judgement_of(self, trajectory: Trajectory) -> JudgedEpisode | None:
        return self._judgements.get((trajectory.trajectory_id, trajectory.attempt))

    def _outline_of(self, trajectory: Trajectory, columns: Mapping[str, Column] | None) -> dict[str, Json]:
        start, stop = (0, 0) if self._tokens is None else self._tokens.spans.get(trajectory.trajectory_id, (0, 0))
        clip_flags, has_masked, loss = [False], False, None
        point = trajectory.forked_from
        if columns is not None and stop > start:
            clip_flags = (columns["clip"][:, start:stop] != Clip.NONE).any(1).tolist()
            has_masked = bool((columns["fate"][start:stop] != Fate.TRAINED).any())
            # Of all passes: these are the parts of the step's loss.
            loss = _sum(columns["share"][:, start:stop])
        versions = {
            int(version) for segment in trajectory.segments for version in segment.weight_version[segment.action_mask]
        }
        return {
            "id": trajectory.trajectory_id,
            "attempt": trajectory.attempt,
            "seed": trajectory.sampling_seed,
            "task": trajectory.task.task_id,
            "outcome": trajectory.outcome.value,
            **({} if point is None else {"fork": f"fork of {point.trajectory_id} from turn {point.turn}"}),
            "num_turns": len(trajectory.turns),
            "success": trajectory.success,
            "return": trajectory.reward if trajectory.is_scored else None,
            "error": trajectory.error,
            "seconds": trajectory.timing.total_seconds,
            "loss": loss,
            "clipped": clip_flags,
            "masked": has_masked,
            "mixed": len(versions) > 1,
            "disputed": _is_disputed(trajectory, self._judgement_of(trajectory)),
        }


def _openings(groups: Sequence[Sequence[Trajectory]]) -> list[str]:
    """Return the beginning of each group's first message to the policy, as a name of its task.

    Of a long one it begins with the word at which tasks of the same environment begin to differ; "" if they are all the
    same.
    """
    words = [
        next((message.content.split() for message in members[0].messages if message.role == "user"), [])
        for members in groups
    ]
    words_of_env: dict[str, list[list[str]]] = defaultdict(list)
    for members, own in zip(groups, words, strict=True):
        words_of_env[members[0].task.env_id].append(own)
    num_shared = {
        env: sum(1 for _ in takewhile(lambda place: len(set(place)) == 1, zip(*texts, strict=False)))
        for env, texts in words_of_env.items()
    }
    openings = []
    for members, own in zip(groups, words, strict=True):
        env = members[0].task.env_id
        is_alike = num_shared[env] == max(map(len, words_of_env[env]))
        is_short = len(" ".join(own)) <= _MAX_OPENING
        openings.append("" if is_alike else " ".join(own if is_short else own[num_shared[env] :])[:_MAX_OPENING])
    return openings


def _is_disputed(trajectory: Trajectory, judged_episode: JudgedEpisode | None) -> bool:
    """Return whether the judge gave more than half of its scale to a failure, or not more to a success."""
    if judged_episode is None or judged_episode.judgement.outcome_review is None:
        return False
    is_good = trajectory.success
    if is_good is None and judged_episode.env_return is not None:
        is_good = judged_episode.env_return > 0
    return is_good is not None and (judged_episode.judgement.outcome_review.total > 0.5) != is_good


def _scales(columns: Mapping[str, Column] | None, trajectories: Sequence[Trajectory]) -> list[dict[str, float]]:
    """Return, by pass, the size that 95 of 100 of the step's tokens do not exceed, for each quantity that has one."""
    if columns is None:
        logprobs = [segment.rollout_logprobs[segment.action_mask] for each in trajectories for segment in each.segments]
        return [_scale({"logprob": np.concatenate([np.zeros(0, np.float32), *logprobs])})]
    with np.errstate(divide="ignore", invalid="ignore"):  # what is not finite has no colour, such as log 0
        gap, log_ratio = columns["old_logprob"] - columns["rollout_logprob"], np.log(columns["ratio"])
    every = {"logprob": columns["rollout_logprob"], "advantage": columns["advantage"], "gap": gap}
    own = {"ratio": log_ratio, "entropy": columns["entropy"], "loss": columns["share"]}
    return [_scale(every | {name: each[i] for name, each in own.items()}) for i in range(len(columns["ratio"]))]


def _scale(quantities: Mapping[str, Column]) -> dict[str, float]:
    scales = {}
    for name, values in quantities.items():
        sizes = np.sort(np.abs(values[np.isfinite(values)]))
        if len(sizes):
            scales[name] = float(sizes[int(0.95 * (len(sizes) - 1))] or sizes[-1] or 1.0)
    return scales


def _about(config: Mapping[str, Json]) -> dict[str, str]:
    rollout = config.get("rollout", {})
    sources = [rollout, *rollout.get("mixture", ())]
    values = {
        "environment": ", ".join(source["env_name"] for source in sources if source.get("env_name")),
        "model": str(config["model"].get("base") or config["model"].get("source") or ""),
        "objective": str(config.get("algorithm", {}).get("variety", "")),
        "engine": str(rollout.get("engine", "")),
    }
    return {key: value for key, value in values.items() if value}


def _rules(config: Mapping[str, Json]) -> dict[str, Json]:
    """Return the settings that the numbers of tokens follow from; see `diagnosis/tokens.py`."""
    rollout = config.get("rollout", {})
    return {name: config.get(name, {}) for name in ("loss", "advantages", "rewards", "correction", "training")} | {
        "distillation": config.get("distillation"),
        "rollout": {
            name: rollout[name] for name in (*SAMPLING_NAMES, "min_output_tokens", "rescore") if name in rollout
        },
        "has_forks": rollout.get("forks_per_episode", 0) > 0,
        "scores_truncated": "truncated_sampling" not in config.get("algorithm", {}).get("acknowledge", ()),
        "dtypes": [table["dtype"] for name in ("model", "vllm") if "dtype" in (table := config.get(name, {}))],
    }


def _metrics(lines: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    """Return the metrics by column, thinned to every `stride`-th step and the last one."""
    stride = -(-len(lines) // MAX_POINTS) or 1
    thinned_lines = [line for i, line in enumerate(lines) if (len(lines) - 1 - i) % stride == 0]
    names = sorted({name for line in thinned_lines for name in line if "/" in name})
    return {
        "step": [line["step"] for line in thinned_lines],
        "time": [line["time"] for line in thinned_lines],
        "values": {name: [line.get(name) for line in thinned_lines] for name in names},
        "help": {name: METRICS[name] for name in names if name in METRICS},
        "key": [name for name in KEY_CURVES if name in names],
        "stride": stride,
    }


def _evaluation(event: Mapping[str, Json]) -> dict[str, Json]:
    data = event["data"]
    score = data.get("score", "mean_return")
    interval = data.get("success_interval" if score == "success_rate" else f"{score}_interval") or (None, None)
    return {
        "step": event["step"],
        "time": event["time"],
        "score": score,
        "value": data.get(score),
        "low": interval[0],
        "high": interval[1],
        "num_episodes": data.get("num_episodes"),
    }


def _event(event: Mapping[str, Json]) -> dict[str, Json]:
    data_text = ", ".join(f"{key}: {value}" for key, value in event["data"].items())
    return {key: event[key] for key in ("seq", "time", "step", "kind")} | {"text": data_text[:_MAX_EVENT_CHARS]}


def _turns(trajectory: Trajectory, record: JudgedEpisode | None, leaves: tuple[int, int] | None) -> dict[str, Json]:
    return {
        "messages": [message.to_dict() for message in trajectory.messages],
        "turns": [
            {
                "segment": turn.segment,
                "observation": turn.observation_span,
                "action": turn.action_span,
                "finish": turn.finish_reason.value,
                "parse": turn.parse.value,
                "reward": turn.reward,
                "terms": dict(turn.reward_terms),
                "events": turn.events,
            }
            for turn in trajectory.turns
        ],
        "segments": [
            {"ids": segment.token_ids.tolist(), "sampled": np.flatnonzero(segment.action_mask).tolist()}
            for segment in trajectory.segments
        ],
        "diverges": leaves,
        "judge": None if record is None else _judgement(record),
    }


def _columns(trajectory: Trajectory, tokens: TokenFile | None) -> dict[str, Json]:
    """Return the columns of the sampled tokens, segment after segment: the environment's have no numbers.

    `passes` are the columns that each pass of the update over the batch has of its own.
    """
    if tokens is None or trajectory.trajectory_id not in tokens.spans:
        segment_columns = [
            (segment.rollout_logprobs, segment.weight_version, segment.action_mask) for segment in trajectory.segments
        ]
        return {
            "columns": {
                "rollout_logprob": [x for logprobs, _, mask in segment_columns for x in _numbers(logprobs[mask])],
                "weight_version": [x for _, versions, mask in segment_columns for x in versions[mask].tolist()],
            },
            "passes": [{}],
        }
    columns = tokens.columns(trajectory.trajectory_id)
    return {
        "columns": {
            name: _numbers(values)
            for name, values in columns.items()
            if name not in PASS_COLUMNS and not _is_unknown(values)
        },
        "passes": [
            {
                name: _numbers(columns[name][i])
                for name in PASS_COLUMNS
                if columns[name].ndim == 2 and not _is_unknown(columns[name][i])
            }
            for i in range(tokens.num_passes)
        ],
        "optimizer_steps": columns["optimizer_step"].tolist(),
    }


def _is_unknown(values: np.ndarray[Any, Any]) -> bool:
    return values.dtype.kind == "f" and bool(np.isnan(values).all())


def _numbers(values: np.ndarray[Any, Any]) -> list[float | int | None]:
    """Return a float32 as the shortest decimal that reads back as the same float32, and null where it is not finite."""
    if values.dtype.kind != "f":
        return list(values.tolist())
    return [
        float(text) if is_known else None
        for text, is_known in zip(values.astype(str), np.isfinite(values), strict=True)
    ]


def _sum(values: np.ndarray[Any, Any]) -> float | None:
    """Return the sum in float64; None if it is not finite."""
    with np.errstate(invalid="ignore"):
        total = float(values.sum(dtype=np.float64))
    return total if np.isfinite(total) else None


def _judgement(judged_episode: JudgedEpisode) -> dict[str, Json]:
    judgement = judged_episode.judgement

    def review(part: Any) -> dict[str, Json]:
        criteria = {key: {"score": verdict.score, "reason": verdict.reason} for key, verdict in part.criteria.items()}
        return {"total": part.total, "summary": part.summary, "criteria": criteria}

    return {
        "judge": judgement.judge,
        "events": [review(verdict) for verdict in judgement.event_reviews],
        "outcome": None if judgement.outcome_review is None else review(judgement.outcome_review),
        "flags": judgement.flags,
        "env_return": judged_episode.env_return,
        "env_rewards": judged_episode.env_rewards,
        "blend": judged_episode.blend.model_dump(),
        "episode_return": judged_episode.episode_return,
    }


def _divergences(group: Sequence[Trajectory]) -> list[tuple[int, int] | None]:
    """Return, by episode, the segment and the token at which it leaves the last of its siblings; None: it has none.

    That is the length of the longest prefix that it shares with any sibling.
    """
    empty = np.zeros(0, np.int32)
    tokens = [np.concatenate([empty, *(segment.token_ids for segment in t.segments)]) for t in group]
    leaves: list[tuple[int, int] | None] = []
    for i, mine in enumerate(tokens):
        shared_lengths = [_common(mine, theirs) for j, theirs in enumerate(tokens) if j != i]
        place = max(shared_lengths, default=len(mine))
        segment = 0
        while segment < len(group[i].segments) and place >= len(group[i].segments[segment]):
            place -= len(group[i].segments[segment])
            segment += 1
        leaves.append((segment, place) if segment < len(group[i].segments) else None)
    return leaves


def _common(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> int:
    size = min(len(a), len(b))
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if len(differ) else size


def run_tokenizer(folder: Path) -> Any | None:
    """Return the `tokenizers.Tokenizer` of a run's newest checkpoint, or its own (Any: untyped); None: it has none."""
    from tokenizers import Tokenizer

    paths = [*folder.glob("tokenizer.json"), *sorted((folder / "checkpoints").glob("step_*/tokenizer.json"))]
    return Tokenizer.from_file(str(paths[-1])) if paths else None


_SCRIPTS = ("dom.js", "charts.js", "episodes.js", "main.js")


def saved_page(runs: Sequence[Mapping[str, Json]], steps: Sequence[Mapping[str, Json]]) -> str:
    """Return the page with its data in it.

    Args:
        runs: `page_data.run_values` of the run, and of runs whose curves are drawn beside its own.
        steps: `page_data.step_values` of the first run.

    Raises:
        ValueError: the data hold a NaN or an infinity.
    """
    text = json.dumps({"runs": runs, "steps": steps}, allow_nan=False, separators=(",", ":"))
    data = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    return _page(str(runs[0]["run"]["label"]), data, ("saved.js",), "default-src 'none'")


def live_page(title: str) -> str:
    """Return the page that asks the server it came from; see `cli/view.py`."""
    return _page(title, "", ("live.js",), "default-src 'none'; connect-src 'self'")


def _page(title: str, data: str, sources: Sequence[str], policy: str) -> str:
    assets = files("gspo_gym.run.report") / "assets"

    def read(name: str) -> str:
        return (assets / name).read_text(encoding="utf-8")

    style = read("uPlot.min.css") + read("page.css")
    licence = "\n".join(f" * {line}" for line in read("uPlot.LICENSE").splitlines())
    ours = "\n".join(read(name) for name in (*_SCRIPTS, *sources))
    script = f"/* uPlot:\n{licence}\n */\n{read('uPlot.iife.min.js')}\n{ours}"
    own_policy = f"script-src '{_digest(script)}'; style-src '{_digest(style)}'; base-uri 'none'; form-action 'none'"
    return Template(read("page.html")).substitute(
        title=html.escape(f"{title} · gspo_gym"),
        policy=f"{policy}; {own_policy}",
        style=style,
        data=data,
        script=script,
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
