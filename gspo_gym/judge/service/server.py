"""A judge of ours behind the HTTP contract, for other trainers: `POST /judge/v1/score`, also below /api, and where
the contract's later form has it.

An episode that cannot be scored is answered with status "failed" and a reason, never with a number. A judge that is
down, or whose model does not accept its key, is 503, one whose budget is spent 402, a rubric or an episode that is none
422. Called by `gspo-gym judge serve`, which puts a guard before it; for notebooks see
`remote.serving.BackgroundServer`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import fastapi
from pydantic import ValidationError

from gspo_gym.base.strict_json import read_json
from gspo_gym.errors import ConfigError, RecordError, UnknownNameError
from gspo_gym.judge.base import (
    Judge,
    JudgeBudgetError,
    JudgeDeniedError,
    JudgeDownError,
    JudgeError,
    JudgeRequest,
    Rubrics,
)
from gspo_gym.judge.rubric_files import parse_task_rubrics
from gspo_gym.judge.rubric_merge import RubricsPatch, merge_rubrics
from gspo_gym.judge.service.contract import LATER_ROUTE, ROUTE, ScoreRequest, judgement_to_wire
from gspo_gym.judge.service.wire_episode import read_episode

_RETRY_AFTER_SECONDS = "15"

# An id that a request names -> its rubrics; raises UnknownNameError.
FindRubrics = Callable[[str], RubricsPatch]


def create_judge_app(
    judge: Judge, *, default: RubricsPatch | None = None, find_rubrics: FindRubrics | None = None
) -> fastapi.FastAPI:
    """The ASGI application; it closes the judge when it ends.

    Args:
        judge: who scores.
        default: for requests that bring no rubric and name none.
        find_rubrics: of an id in a request; None: no id is known.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: fastapi.FastAPI) -> AsyncIterator[None]:
        yield
        await judge.close()

    async def score(http: fastapi.Request) -> Any:
        try:
            body = ScoreRequest.model_validate(read_json(await http.body()))
            rubrics = _rubrics_of(body, default, find_rubrics)
            episode = read_episode(body)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the body"
            raise _error(422, "invalid_request", f"{where}: {first['msg']}") from None
        except (ConfigError, RecordError, UnknownNameError) as error:
            raise _error(422, "invalid_request", str(error)) from error
        request = JudgeRequest(episode.trajectory, rubrics, task_app=body.task_app.id)
        try:
            judgement = await judge.judge(request)
        except JudgeBudgetError as error:
            raise _error(402, "judge_budget", str(error)) from error
        except (JudgeDownError, JudgeDeniedError) as error:
            raise _error(503, "judge_down", str(error)) from error
        except JudgeError as error:
            return {"status": "failed", "event_reviews": [], "event_totals": [], "details": {"error": str(error)}}
        return judgement_to_wire(judgement, request, event_indices=episode.event_indices)

    app = fastapi.FastAPI(title=f"The judge {judge.name}", lifespan=lifespan)
    app.add_api_route("/health", _health, methods=["GET"])
    for route in (ROUTE, f"/api{ROUTE}", f"/api{LATER_ROUTE}"):
        app.add_api_route(route, score, methods=["POST"])
    return app


async def _health() -> dict[str, str]:
    return {"status": "healthy"}


def _rubrics_of(body: ScoreRequest, default: RubricsPatch | None, find_rubrics: FindRubrics | None) -> Rubrics:
    """The request's criteria, or those of its id, or the default; its overrides over them; what it asks for of them.

    `tracks` and `weights` are those of `Rubrics.only_tracks` and `Rubrics.with_track_weights`.

    Raises:
        ConfigError: there is none, or it is none. UnknownNameError: no such id.
    """
    options = body.options
    sources: list[RubricsPatch] = []
    if body.rubric:
        sources.append(parse_task_rubrics(body.rubric, where="rubric"))
    elif options.rubric_id and find_rubrics is not None:
        sources.append(find_rubrics(options.rubric_id))
    elif options.rubric_id:
        raise UnknownNameError(
            f"options.rubric_id: no rubric is known here, so not {options.rubric_id!r}; send `rubric`"
        )
    elif default is not None:
        sources.append(default)
    if options.rubric_overrides:
        sources.append(parse_task_rubrics(options.rubric_overrides, where="options.rubric_overrides"))
    merged = merge_rubrics(*sources)
    rubrics = Rubrics(merged.event if options.event else None, merged.outcome if options.outcome else None)
    if rubrics.event is None and rubrics.outcome is None:
        raise ConfigError(
            "rubric: expected criteria for events or for the outcome, whichever options ask for, got none; send "
            "`rubric` or options.rubric_id"
        )
    return rubrics.only_tracks(options.tracks or ()).with_track_weights(options.weights or {})


def _error(status: int, code: str, message: str) -> fastapi.HTTPException:
    headers = {"Retry-After": _RETRY_AFTER_SECONDS} if status == 503 else None
    return fastapi.HTTPException(status, {"error": {"code": code, "message": message}}, headers)
