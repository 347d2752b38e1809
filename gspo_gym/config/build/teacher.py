"""The teacher that a run begins with: which model it is, that ids mean the same to it, and that it stays the same.

A name such as `RUN@best` may mean another checkpoint tomorrow, and an endpoint may serve another model: what a run is
taught by is found once, recorded, and required when the run goes on. Not for loading a teacher (`reference.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_gym.config.run_config import RunConfig
from gspo_gym.errors import CheckpointError, ConfigError, GymError, ServiceError, UnknownNameError
from gspo_gym.learning.settings import DistillationSettings
from gspo_gym.policy.endpoint import EndpointTeacher, ServedModel
from gspo_gym.policy.load import Policy, folder_of, load_tokenizer, vocabulary_digest
from gspo_gym.policy.manifest import weights_digest
from gspo_gym.run.models import Model, find_model
from gspo_gym.run.records import read_run_id, read_teacher

# Of what is recorded, what must not change while a run is taught, where both records have it: digests first, and the
# names only without them, because a folder may be moved and an endpoint's address change.
_DIGESTS, _NAMES = ("vocabulary_sha256", "weights_sha256"), ("model", "root", "base")


@dataclass(frozen=True, slots=True)
class FoundTeacher:
    """What teaches a run.

    Attributes:
        facts: as recorded (JSON); see `read_teacher`.
        endpoint: which scores; None: it is a model in this process.
    """

    facts: Mapping[str, Any]
    endpoint: EndpointTeacher | None = None


def teachers_model(config: RunConfig) -> Model:
    """Return the model that teaches a run, which is neither an endpoint's nor its own teacher.

    Raises:
        UnknownNameError, CheckpointError: there is no such model, run or step.
    """
    assert config.distillation is not None
    try:
        return find_model(config.distillation.teacher, runs=Path(config.run.folder))
    except (UnknownNameError, CheckpointError) as error:
        raise type(error)(f"distillation.teacher: {error}") from error


def new_endpoint_teacher(settings: DistillationSettings) -> EndpointTeacher:
    """Return the teacher behind the endpoint of [distillation], which nothing is asked of yet."""
    return EndpointTeacher(settings.teacher, model=settings.teacher_model, api_key_env=settings.api_key_env)


async def find_teacher(config: RunConfig, policy: Policy, *, is_resumed: bool = False) -> FoundTeacher | None:
    """Return what teaches the run; None without [distillation], or if the policy teaches itself.

    An endpoint is asked, and scores a few tokens. A resumed run requires the teacher that it has recorded.

    Raises:
        ConfigError: its vocabulary is another one or cannot be proved, it reads too little, or it is not the one that
            the run was taught by. UnknownNameError, CheckpointError: there is no such model.
        ServiceError: an endpoint does not answer, or gives no logprobs of prompts.
    """
    settings = config.distillation
    if settings is None or settings.is_self:
        return None
    if settings.is_endpoint:
        teacher = await _behind_endpoint(config, settings, policy)
    else:
        teacher = _in_this_process(config, settings, policy)
    _require_same(read_teacher(config.run_folder) if is_resumed else None, teacher.facts)
    return teacher


def _in_this_process(config: RunConfig, settings: DistillationSettings, policy: Policy) -> FoundTeacher:
    model = teachers_model(config)
    is_folder = Path(model.base).expanduser().is_dir()
    base = str(Path(model.base).expanduser().absolute()) if is_folder else model.base  # for readers elsewhere
    facts: dict[str, Any] = {"teacher": settings.teacher, "base": base}
    if model.run is not None:
        facts |= {"run": model.run.absolute().name, "run_id": read_run_id(model.run), "step": model.step}
    facts["vocabulary_sha256"] = vocabulary_digest(policy.tokenizer)  # as the teacher's: it is refused otherwise
    folder = folder_of(model.base)
    digest = None if folder is None else weights_digest(folder)
    return FoundTeacher(facts if digest is None else facts | {"weights_sha256": digest})


async def _behind_endpoint(config: RunConfig, settings: DistillationSettings, policy: Policy) -> FoundTeacher:
    endpoint = new_endpoint_teacher(settings)
    try:
        served = (await endpoint.find()).model
    except ServiceError as error:
        raise ServiceError(
            f"distillation.teacher: {error}. Expected the URL, up to and with /v1, of a server that gives "
            "prompt_logprobs, as vLLM and gspo-gym models serve do"
        ) from error
    needed = config.rollout.max_model_len + (0 if served.proves_itself else 1)  # vLLM samples a token after a prompt
    if served.max_model_len is not None and served.max_model_len < needed:
        raise ConfigError(
            f"distillation.teacher: {served.name} at {endpoint.url} reads {served.max_model_len} tokens, expected "
            f"{needed} for rollout.max_model_len = {config.rollout.max_model_len}: lower that, or serve with a longer "
            "context"
        )
    own, vocabulary = vocabulary_digest(policy.tokenizer), _vocabulary_of(served, settings)
    if vocabulary != own:
        raise ConfigError(
            f"distillation.teacher: {served.name} at {endpoint.url} has another vocabulary than the model (SHA-256 "
            f"{vocabulary[:12]} and {own[:12]}), so that ids mean other texts to it; serve a model of the policy's own "
            "family"
        )
    facts = {"teacher": settings.teacher, "model": served.name, "vocabulary_sha256": vocabulary}
    known = {"root": served.root, "weights_sha256": served.weights or _weights_of(served)}
    return FoundTeacher(facts | {name: value for name, value in known.items() if value is not None}, endpoint)


def _vocabulary_of(served: ServedModel, settings: DistillationSettings) -> str:
    """Return the digest of a served model's vocabulary: its own, or of the tokenizer that is named for it.

    Raises:
        ConfigError: it cannot be known; says what to do.
    """
    if served.vocabulary is not None:
        if settings.teacher_tokenizer is not None:
            raise ConfigError(
                f"distillation.teacher_tokenizer: {settings.teacher} publishes its vocabulary's digest, which is "
                "believed more: remove this"
            )
        return served.vocabulary
    name = settings.teacher_tokenizer or served.root
    if name is None:
        raise ConfigError(
            f"distillation.teacher: {settings.teacher} does not say which tokenizer {served.name} has, so that its "
            "vocabulary cannot be proved: name it in distillation.teacher_tokenizer (a folder, or an id of the hub)"
        )
    try:
        return vocabulary_digest(load_tokenizer(name))
    except (GymError, OSError) as error:
        key = "teacher" if settings.teacher_tokenizer is None else "teacher_tokenizer"
        raise ConfigError(
            f"distillation.{key}: the tokenizer {name!r} of {served.name} at {settings.teacher} cannot be loaded here, "
            "so that its vocabulary cannot be proved: name one that can be in distillation.teacher_tokenizer, such as "
            f"a folder with the same files ({error})"
        ) from error


def _weights_of(served: ServedModel) -> str | None:
    """Return the digest of weights that the server read from a folder which is here, too; None: they are elsewhere."""
    folder = None if served.root is None else Path(served.root)
    try:
        return weights_digest(folder) if folder is not None and folder.is_absolute() and folder.is_dir() else None
    except (CheckpointError, OSError):
        return None


def _require_same(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> None:
    """Refuse another teacher than the one that was recorded.

    Raises:
        ConfigError: they differ; names both.
    """
    if before is None:
        return
    has_digests = "weights_sha256" in before and "weights_sha256" in now
    differing = [
        f"{name} {before[name]!r} became {now[name]!r}"
        for name in (_DIGESTS if has_digests else (*_DIGESTS, *_NAMES))
        if name in before and name in now and before[name] != now[name]
    ]
    if not differing:
        return
    step = "" if before.get("step") is None else f": distillation.teacher = {before['run']}@{before['step']}"
    raise ConfigError(
        f"distillation.teacher: a run has one teacher, and {now['teacher']} is not the one that this run began with "
        f"({'; '.join(differing)}); name or serve that one again{step}"
    )
