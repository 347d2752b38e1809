"""judgements.jsonl of a run: every judgement, and how each episode's reward was made of it.

One object per line, appended in the order of judging; readers leave out a torn last line. A resumed run judges the
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
from gspo_gym.types import Trajectory

JUDGEMENTS_FILE = "judgements.jsonl"
# Raise it when a reader of the old shape would misread the new one.
JUDGEMENTS_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class JudgedEpisode:
    """A judgement with its episode and the reward made of both.

    Attributes:
        env_rewards: the environment's rewards (or their step rewards), one per turn; None where it gave none.
        episode_return: the blended return.
        spent: the cost of judging in the run until then, calls without a score included.
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

    @classmethod
    def of(
        cls,
        trajectory: Trajectory,
        judgement: Judgement,
        rewards: Sequence[float | None],
        blend: RewardBlend,
        reward: float,
    ) -> JudgedEpisode:
        """Return the record of an episode with these rewards of its environment and this blended return."""
        return cls(
            trajectory_id=trajectory.trajectory_id,
            attempt=trajectory.attempt,
            env_id=trajectory.task.env_id,
            seed=trajectory.task.seed,
            judgement=judgement,
            env_rewards=tuple(rewards),
            blend=blend,
            episode_return=reward,
        )

    @property
    def env_return(self) -> float | None:
        """Return the sum of the environment's rewards; None if it gave none."""
        given = [reward for reward in self.env_rewards if reward is not None]
        return float(sum(given)) if given else None


def judgement_to_json(judgement: Judgement) -> dict[str, Any]:
    """Return the JSON object from which `judgement_from_json` makes an equal judgement."""
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
    """Read a judgement; a RecordError if a field is missing or has the wrong type."""
    try:
        outcome = values["outcome_review"]
        return Judgement(
            judge=values["judge"],
            event_reviews=tuple(_review_from_json(review) for review in values["event_reviews"]),
            outcome_review=None if outcome is None else _review_from_json(outcome),
            flags=tuple(values["flags"]),
            cuts=tuple(values.get("cuts", ())),  # files of earlier versions have none
            disagreement=values["disagreement"],
            cost=JudgeCost(**values["cost"]),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise RecordError(f"not a judgement: {type(error).__name__}: {error}") from error


def judged_to_json(judged: JudgedEpisode) -> dict[str, Any]:
    """Return a line's JSON object. The parts before weights are for people; they follow from the reviews."""
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
        # null and not 0: a part that was not judged has no score.
        "event_total": judgement.event_total if judgement.event_reviews else None,
        "outcome_total": None if judgement.outcome_review is None else judgement.outcome_total,
        "env_rewards": list(judged.env_rewards),
        "judgement": judgement_to_json(judgement),
        "spent": asdict(judged.spent),
    }


def judged_from_json(values: Mapping[str, Any]) -> JudgedEpisode:
    """Read a line's object; a RecordError for another schema, or a field that is missing or has the wrong type."""
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
    # It is a ValueError, too, and says already what is wrong.
    except RecordError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"not a judged episode: {type(error).__name__}: {error}") from error


class JudgementRecorder:
    """Appends judgements to a file and removes only a torn last line of earlier processes. The folder must exist."""

    def __init__(self, path: Path) -> None:
        cut_torn_line(path)
        self._path = path

    def __call__(self, judged: JudgedEpisode) -> None:
        """Append one line; a RecordError if it holds a number that JSON cannot express."""
        try:
            append_line(self._path, json.dumps(judged_to_json(judged), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise RecordError(f"judgement of {judged.trajectory_id} cannot be written as JSON: {error}") from error


def read_judgements(path: Path) -> list[JudgedEpisode]:
    """Return the lines of a judgements.jsonl in order; none if there is no file.

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
    """Return the last judgement, the one that counts, by trajectory id and attempt."""
    return {(each.trajectory_id, each.attempt): each for each in judged}


def _review_to_json(review: Review) -> dict[str, Any]:
    scores = {name: {"score": score.score, "reason": score.reason} for name, score in review.criteria.items()}
    return {"criteria": scores, "total": review.total, "summary": review.summary}


def _review_from_json(values: Mapping[str, Any]) -> Review:
    scores = {name: CriterionScore(**score) for name, score in values["criteria"].items()}
    return Review(scores, values["total"], values["summary"])
