"""A judge of groups over real HTTP: one call compares the episodes of a group, whoever of them asks.

The model is the fake one: an episode's score is the share of the words "heron" and "cobalt" that the policy said.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import pytest
from judged_episodes import BOTH, OUTCOME, episode, model_settings

from gspo_gym.judge.asking import JudgementCache
from gspo_gym.judge.base import BY_RULE, JudgeError, Judgement, JudgeRequest, Rubrics
from gspo_gym.judge.model.judge import ModelJudge, plan_comparison
from gspo_gym.judge.model.prompt import verdict_key, verdict_schema
from gspo_gym.judge.model.transcript import read_transcript
from gspo_gym.judge.server import create_fake_judge_app, honest_verdict, read_prompt
from gspo_gym.remote.serving import BackgroundServer
from gspo_gym.types import Trajectory

WORDS = Rubrics(outcome=OUTCOME)
SETTINGS = model_settings("stub", mode="group")

Messages = Sequence[Mapping[str, str]]


class Model:
    """The fake judging model, which remembers what it was asked."""

    def __init__(self) -> None:
        self.prompts: list[Messages] = []

    def __call__(self, messages: Messages) -> str:
        self.prompts.append(messages)
        return honest_verdict(read_prompt(messages))


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def url(model: Model) -> Iterator[str]:
    with BackgroundServer(create_fake_judge_app(answer=model)) as server:
        yield f"{server.url}/v1"


def group_of(*said: Sequence[str]) -> tuple[Trajectory, ...]:
    return tuple(episode(*texts, trajectory_id=f"g/{number}") for number, texts in enumerate(said))


def judge_group(
    url: str, group: Sequence[Trajectory], *, rubrics: Rubrics = WORDS, cache: JudgementCache | None = None
) -> list[Judgement | BaseException]:
    async def play() -> list[Judgement | BaseException]:
        judge = ModelJudge(model_settings("stub", base_url=url, mode="group"), cache=cache)
        requests = [JudgeRequest(member, rubrics, group=tuple(group)) for member in group]
        answers = await asyncio.gather(*map(judge.judge, requests), return_exceptions=True)
        await judge.close()
        return list(answers)

    return asyncio.run(play())


def totals_of(answers: Sequence[Judgement | BaseException]) -> list[float]:
    return [answer.outcome_total for answer in answers if isinstance(answer, Judgement)]


@pytest.mark.parametrize("cache", [None, JudgementCache()], ids=["its own cache", "a shared one"])
def test_one_call_scores_all_episodes_of_a_group_and_is_paid_for_once(
    url: str, model: Model, cache: JudgementCache | None
) -> None:
    answers = judge_group(url, group_of(["a heron", "a stone"], ["cobalt", "heron"], ["a stone"]), cache=cache)
    assert totals_of(answers) == [0.5, 1.0, 0.0]
    assert len(model.prompts) == 1
    assert [a.cost.num_calls for a in answers if isinstance(a, Judgement)] == [1, 0, 0]
    assert {tuple(a.outcome_review.criteria) for a in answers if isinstance(a, Judgement) and a.outcome_review} == {
        ("comparison",)
    }


def test_what_all_episodes_begin_with_is_shown_once_and_the_rest_under_their_numbers(url: str, model: Model) -> None:
    group = group_of(["I look.", "a heron"], ["I look.", "cobalt"], ["I look.", "a stone", "heron"])
    assert totals_of(judge_group(url, group)) == [0.5, 0.5, 0.5]
    labels = Counter(label for label, _ in read_prompt(model.prompts[0]).pieces)
    shared = [label for label in labels if label.startswith("all episodes, ")]
    assert shared == [
        "all episodes, before turn 1: system",
        "all episodes, before turn 1: user",
        "all episodes, turn 1: policy, text",
        "all episodes, answer to turn 1: user",
    ]
    assert set(labels.values()) == {1}
    # Two more pieces in two of the episodes, four in the third.
    own = Counter(label.partition(",")[0] for label in labels if label not in shared)
    assert sorted(own.values()) == [2, 2, 4]


def test_an_episode_that_is_the_beginning_of_another_is_still_one_of_them(url: str, model: Model) -> None:
    assert totals_of(judge_group(url, group_of(["a heron"], ["a heron", "cobalt"]))) == [0.5, 1.0]
    assert "(episode " in model.prompts[0][-1]["content"]


def test_equal_episodes_are_shown_once_and_get_one_score(url: str, model: Model) -> None:
    assert totals_of(judge_group(url, group_of(["a heron"], ["cobalt heron"], ["a heron"]))) == [0.5, 1.0, 0.5]
    assert set(read_prompt(model.prompts[0]).parts) == {"episode_1", "episode_2"}
    assert totals_of(judge_group(url, group_of(["a heron"], ["a heron"]))) == [0.5, 0.5]


def test_an_episode_that_says_nothing_gets_the_lowest_score_and_is_not_shown(url: str, model: Model) -> None:
    answers = judge_group(url, group_of(["", "."], ["a heron"], ["cobalt"]))
    assert totals_of(answers) == [0.0, 0.5, 0.5]
    assert isinstance(answers[0], Judgement)
    assert answers[0].outcome_review is not None
    assert answers[0].outcome_review.summary == BY_RULE
    assert set(read_prompt(model.prompts[0]).parts) == {"episode_1", "episode_2"}
    assert totals_of(judge_group(url, group_of([""], ["..."]))) == [0.0, 0.0]
    assert len(model.prompts) == 1


def test_a_group_of_one_and_a_rubric_of_turns_are_refused(url: str, model: Model) -> None:
    (alone,) = judge_group(url, group_of(["a heron"]))
    assert isinstance(alone, JudgeError)
    assert str(alone) == 'no other episode of its group to compare it with; judge.options.mode "auto" judges it alone'
    by_turns = judge_group(url, group_of(["a heron"], ["cobalt"]), rubrics=BOTH)
    assert {str(answer) for answer in by_turns} == {
        'mode "group" compares whole episodes: expected a rubric of the outcome alone'
    }
    assert model.prompts == []


def test_an_episode_without_a_group_is_judged_alone_by_the_rubric(url: str, model: Model) -> None:
    async def play() -> Judgement:
        judge = ModelJudge(model_settings("stub", base_url=url, mode="group"))
        judgement = await judge.judge(JudgeRequest(episode("a heron", "a heron, dot"), BOTH))
        await judge.close()
        return judgement

    judgement = asyncio.run(play())
    # By the fake's rule: 3 * 1 / 4 for a turn with heron, and a dot more in the second; half of both words.
    assert (judgement.event_totals, judgement.outcome_total) == ((0.75, 1.0), 0.5)


def test_the_question_is_the_same_whoever_is_which_member(url: str, model: Model) -> None:
    said = (["a heron"], ["cobalt"], ["a stone"], ["heron cobalt"])
    for order in itertools.permutations(said):
        answers = judge_group(url, group_of(*order))
        assert totals_of(answers) == [
            {"a heron": 0.5, "cobalt": 0.5, "a stone": 0.0, "heron cobalt": 1.0}[t] for (t,) in order
        ]
    without_key = {re.sub(r"[0-9a-f]{20}", "", messages[-1]["content"]) for messages in model.prompts}
    assert len(without_key) == 1


def test_every_member_stands_at_every_place_in_about_equally_many_groups() -> None:
    num_groups, size = 480, 4
    places = Counter[tuple[int, str | None]]()
    for number in range(num_groups):
        whole = {
            str(member): read_transcript(episode(f"I am {member} of {number}", trajectory_id=f"{number}/{member}"))
            for member in range(size)
        }
        comparison = plan_comparison(whole, OUTCOME, SETTINGS)
        places.update((member, comparison.part_by_id[str(member)]) for member in range(size))
    # A quarter of 480 is 120, give or take sqrt(480 * 3/16) = 9.5; four of that.
    assert len(places) == size * size
    assert all(abs(count - 120) < 38 for count in places.values()), places


def test_a_long_episode_takes_nothing_from_the_others() -> None:
    settings = model_settings("stub", mode="group", max_transcript_chars=6_000)
    honest = ["a heron " * 100, "a stone " * 100]

    def shown(padding: str) -> tuple[str, ...]:
        group = group_of(honest, [padding, "heron"], [padding * 2, "cobalt"])
        whole = {t.trajectory_id: read_transcript(t) for t in group}
        comparison = plan_comparison(whole, OUTCOME, settings)
        place = int(str(comparison.part_by_id["g/0"]).removeprefix("episode_")) - 1
        assert (
            comparison.question.transcript.num_chars + sum(e.num_chars for e in comparison.question.episodes)
            < 6_000 + 500
        )
        assert comparison.cuts_of(str(comparison.part_by_id["g/0"])) == ()
        return tuple(piece.text for piece in comparison.question.episodes[place].pieces)

    assert shown("well " * 10) == shown("well " * 20_000)


def test_the_answer_is_held_to_a_schema_of_one_score_an_episode() -> None:
    whole = {t.trajectory_id: read_transcript(t) for t in group_of(["a"], ["b"])}
    schema = verdict_schema("ab" * 10, plan_comparison(whole, OUTCOME, SETTINGS).question.parts)
    verdict = schema["properties"][verdict_key("ab" * 10)]
    assert verdict["required"] == ["episode_1", "episode_2", "summary"]
    score = verdict["properties"]["episode_1"]["properties"]["comparison"]["properties"]["score"]
    assert score == {"type": "number", "minimum": 0.0, "maximum": 1.0}
