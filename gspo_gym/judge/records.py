"""judgements.jsonl of a run: what the judge said about every episode, and what the episode's reward was made of.

One object a line, in the order of judging, appended; readers leave a torn last line out. A resumed run judges the
episodes after its checkpoint again and appends: of an episode's lines the last counts, and all of them were paid for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gspo_gym.base.files import append_line, cut_torn_line, whole_lines
from gspo_gym.errors import RecordError
from gspo_gym.judge.base import CriterionScore, JudgeCost, Judgement, Review
from gspo_gym.judge.blend import RewardBlend

JUDGEMENTS_FILE = "judgements.jsonl"
# Raise it when a reader of the old shape would misread the new one.
JUDGEMENTS_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class JudgedEpisode:
    """A judgement, the episode it is of, and how the two became its reward.

    Attributes:
        trajectory_id, attempt, env_id, seed: of the episode.
        judgement: what the judge said.
        env_rewards: the environment's own (or what step rewards make of them), one a turn; None where it gave none.
        blend: the weights.
        episode_return: the blended return.
        spent: what judging has cost the run until then, calls without a score included.
    """

    trajectory_id: str
    attempt: int
    env_id: str
    seed: int
    judgement: Judgement
    env_rewards: tuple[float | None, ...]
    blend: RewardBlend
    episode_return: float
    spent: JudgeCost = field(default_factory=JudgeCost)

    @property
    def env_return(self) -> float | None:
        """The sum of the environment's rewards; None if it gave none."""
        return env_return_of(self.env_rewards)


def env_return_of(rewards: Sequence[float | None]) -> float | None:
    """The sum of the rewards that were given; None if there are none."""
    given = [reward for reward in rewards if reward is not None]
    return float(sum(given)) if given else None


def judgement_to_json(judgement: Judgement) -> dict[str, Any]:
    """JSON values (hence Any) that `judgement_from_json` turns into an equal judgement."""
    return {
        "judge": judgement.judge,
        "event_reviews": [_review_to_json(review) for review in judgement.event_reviews],
        "outcome_review": None if judgement.outcome_review is None else _review_to_json(judgement.outcome_review),
        "flags": list(judgement.flags),
        "cuts": list(judgement.cuts),
        "disagreement": judgement.disagreement,
        "cost": asdict(judgement.cost),
    }


def judgement_from_json(values: Mapping[str, Any]) -> Judgement:
    """The judgement that was written.

    Raises:
        RecordError: a field is missing or of another kind.
    """
    try:
        outcome = values["outcome_review"]
        return Judgement(
            judge=values["judge"],
            event_reviews=tuple(_review_from_json(review) for review in values["event_reviews"]),
            outcome_review=None if outcome is None else _review_from_json(outcome),
            flags=tuple(values["flags"]),
            cuts=tuple(values.get("cuts", ())),
            disagreement=values["disagreement"],
            cost=JudgeCost(**values["cost"]),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise RecordError(f"not a judgement: {type(error).__name__}: {error}") from error


def judged_to_json(judged: JudgedEpisode) -> dict[str, Any]:
    """A line's values (Any: JSON). The parts before weights are there for people; they follow from the reviews."""
    judgement = judged.judgement
    return {
        "schema": JUDGEMENTS_SCHEMA,
        "trajectory_id": judged.trajectory_id,
        "attempt": judged.attempt,
        "env_id": judged.env_id,
        "seed": judged.seed,
        "episode_return": judged.episode_return,
        "blend": judged.blend.model_dump(),
        "env_return": judged.env_return,
        "event_total": judgement.event_total if judgement.event_reviews else None,
        "outcome_total": None if judgement.outcome_review is None else judgement.outcome_total,
        "env_rewards": list(judged.env_rewards),
        "judgement": judgement_to_json(judgement),
        "spent": asdict(judged.spent),
    }


def judged_from_json(values: Mapping[str, Any]) -> JudgedEpisode:
    """The record that was written.

    Raises:
        RecordError: another schema, or a field is missing or of another kind.
    """
    if values.get("schema") != JUDGEMENTS_SCHEMA:
        raise RecordError(f"expected schema {JUDGEMENTS_SCHEMA}, got {values.get('schema')!r}")
    try:
        return JudgedEpisode(
            trajectory_id=values["trajectory_id"],
            attempt=values["attempt"],
            env_id=values["env_id"],
            seed=values["seed"],
            judgement=judgement_from_json(values["judgement"]),
            env_rewards=tuple(values["env_rewards"]),
            blend=RewardBlend(**values["blend"]),
            episode_return=values["episode_return"],
            spent=JudgeCost(**values["spent"]),
        )
    except RecordError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"not a judged episode: {type(error).__name__}: {error}") from error


class JudgementRecorder:
    """Appends to a file; what earlier processes wrote stays, except a torn last line. The folder must exist."""

    def __init__(self, path: Path) -> None:
        cut_torn_line(path)
        self._path = path

    def __call__(self, judged: JudgedEpisode) -> None:
        """Write one.

        Raises:
            RecordError: it holds what JSON has no name for.
        """
        try:
            append_line(self._path, json.dumps(judged_to_json(judged), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise RecordError(f"judgement of {judged.trajectory_id} cannot be written as JSON: {error}") from error


def read_judgements(path: Path) -> list[JudgedEpisode]:
    """The lines of a judgements.jsonl in their order; none if there is no file.

    Raises:
        RecordError: a line other than a torn last one is not a judgement; names file and line.
    """
    found = []
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            found.append(judged_from_json(json.loads(line)))
        except (ValueError, AttributeError) as error:  # RecordError included
            raise RecordError(f"{path}:{number}: {error}") from error
    return found


def latest_judgements(judged: Iterable[JudgedEpisode]) -> dict[tuple[str, int], JudgedEpisode]:
    """By trajectory id and attempt, the last one of each, which is the one that counts."""
    return {(each.trajectory_id, each.attempt): each for each in judged}


def _review_to_json(review: Review) -> dict[str, Any]:
    scores = {name: {"score": score.score, "reason": score.reason} for name, score in review.criteria.items()}
    return {"criteria": scores, "total": review.total, "summary": review.summary}


def _review_from_json(values: Mapping[str, Any]) -> Review:
    scores = {name: CriterionScore(**score) for name, score in values["criteria"].items()}
    return Review(scores, values["total"], values["summary"])
