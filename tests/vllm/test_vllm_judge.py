"""vLLM as the judging model, held to the verdict's schema: the protocol holds. A tiny model with random weights judges
nothing, so what the scores are says nothing; that they are complete, on their scales and equal for equal episodes does.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from judged_episodes import BOTH, episode, model_settings

from gspo_gym.base.retries import RetrySettings
from gspo_gym.judge.asking import AskingSettings, JudgementCache
from gspo_gym.judge.base import JudgeError, Judgement, JudgeRequest, Rubrics
from gspo_gym.judge.model.judge import ModelJudge
from gspo_gym.judge.rubric import Criterion, Rubric

MAX_OUTPUT_TOKENS = 2048  # a prompt takes a token for each character, about 1,900 of the 4,096 that the model has
OUTCOME = Rubric(
    (Criterion("outcome.done", "It is done.", scale="binary"), Criterion("outcome.well", "It is done well."))
)
ASKING = AskingSettings(timeout_seconds=240.0, max_concurrency=2, retries=RetrySettings(max_attempts=2))


def judge_all(url: str, *requests: JudgeRequest, **changes: object) -> list[Judgement | JudgeError]:
    """Judgements, or the errors in their place."""
    settings = model_settings("policy", base_url=url, asking=ASKING, **changes)  # type: ignore[arg-type]

    async def play() -> list[Judgement | JudgeError]:
        judge = ModelJudge(settings, cache=JudgementCache())
        answers = await asyncio.gather(*(judge.judge(each) for each in requests), return_exceptions=True)
        await judge.close()
        assert all(isinstance(answer, Judgement | JudgeError) for answer in answers), answers
        return list(answers)  # type: ignore[arg-type]

    return asyncio.run(play())


def test_with_a_schema_a_model_without_sense_gives_verdicts_or_none_and_never_half_ones(
    text_url: str,
) -> None:
    requests = [JudgeRequest(episode(f"I did {number}."), Rubrics(outcome=OUTCOME)) for number in range(4)]
    answers = judge_all(text_url, *requests, max_output_tokens=MAX_OUTPUT_TOKENS, temperature=1.0)
    judged = [answer for answer in answers if isinstance(answer, Judgement)]
    print(f"\n{len(judged)} of {len(answers)} with a verdict: {[answer for answer in answers if answer not in judged]}")
    # Under the schema only texts can go on for too long (a reason that no quote ends): then there is no score.
    for answer in answers:
        if isinstance(answer, JudgeError):
            assert "cut off" in str(answer)
        else:
            assert 0.0 <= answer.outcome_total <= 1.0
            assert answer.cost.output_tokens > 0
    assert judged


def test_equal_episodes_get_equal_scores(text_url: str) -> None:
    one = episode("I did it.")
    group = [JudgeRequest(replace(one, trajectory_id=f"member-{n}"), Rubrics(outcome=OUTCOME)) for n in range(4)]
    answers = judge_all(text_url, *group, max_output_tokens=MAX_OUTPUT_TOKENS)
    assert len({answer.outcome_total if isinstance(answer, Judgement) else None for answer in answers}) == 1


def test_an_answer_that_is_cut_off_is_no_verdict_and_no_score(text_url: str) -> None:
    request = JudgeRequest(episode("heron"), BOTH)
    (answer,) = judge_all(text_url, request, max_output_tokens=8)
    assert isinstance(answer, JudgeError)


def test_an_episode_that_says_nothing_needs_no_model(text_url: str) -> None:
    (answer,) = judge_all(text_url, JudgeRequest(episode("..."), BOTH))
    assert isinstance(answer, Judgement)
    assert (answer.event_total, answer.outcome_total, answer.cost.num_calls) == (0.0, 0.0, 0)
