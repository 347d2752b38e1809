"""Requests for jobs: translate a hosted trainer's body into our configuration, and check it before it is queued."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_gym.config.nested import apply_override, flatten
from gspo_gym.config.run_config import RunConfig
from gspo_gym.config.services import missing_machinery
from gspo_gym.errors import ConfigError

_TRAINED = re.compile(r"(?:[^:]+:.*:)?(job_[0-9a-f]{24})(:step_\d+)?")  # the id of a model that a job trained
_PLACEHOLDER = "job_of_the_service"


@dataclass(frozen=True, slots=True)
class Asked:
    """The content of a request.

    Attributes:
        config: of the run; the job's id replaces its label. base: the model, as the request named it.
    """

    config: RunConfig
    base: str

    def config_of(self, job_id: str) -> str:
        """Return the run's configuration as TOML, with a folder named after the job."""
        model = self.config.model.model_copy(update={"label": job_id})
        return self.config.model_copy(update={"model": model}).to_toml()


@dataclass(frozen=True, slots=True)
class Machine:
    """The service's settings for where jobs are trained, which a job's configuration cannot know.

    Attributes:
        is_local: train with the local engine on one device, and ignore [compute], [topology] and [vllm].
        overrides: "section.key=value", over everything else.
    """

    is_local: bool = False
    overrides: Sequence[str] = ()


def parse_request(body: Mapping[str, Any], *, runs: Path, machine: Machine) -> Asked:
    """Parse a body {"data": {"config", "endpoint_base_url", "model"}, ...} (Any: JSON).

    The URL and the model beside the configuration replace those in it, as in the hosted trainer; the machine's
    overrides replace both. The run goes into `runs`, under the job's id.

    Raises:
        ConfigError: the body is not of that form; the configuration is wrong; or this version cannot train it.
    """
    if body.get("job_type", "rl") != "rl":
        raise ConfigError('job_type: expected "rl", which is the only kind of job here')
    for part in ("tags", "metadata", "compute"):
        if not isinstance(body.get(part), Mapping | None):
            raise ConfigError(f"{part}: expected an object")
    data = body.get("data", body)  # the client's library sends its keys without "data" around them
    if not isinstance(data, Mapping):
        raise ConfigError("data: expected an object with the key config")
    values = _sections_in(data.get("config"))
    if url := _text_in(data, "endpoint_base_url"):
        _section(values, "services")["task_url"] = url
    model = _section(values, "model")
    if name := _text_in(data, "model") or _text_in(data, "base_model"):
        is_trained = _TRAINED.fullmatch(name) is not None
        model.pop("source" if not is_trained else "base", None)
        model["source" if is_trained else "base"] = name
    source = model.get("source")
    if isinstance(source, str) and (trained := _TRAINED.fullmatch(source)):
        model["source"] = f"rl:{trained[1]}{trained[2] or ''}"
    if machine.is_local:
        _make_local(values)
    for override in machine.overrides:
        _, problem = apply_override(values, override)
        if problem is not None:
            raise ConfigError(f"{problem.key}: {problem.text}")
    # Only to pass the check: the job's id is not known yet.
    model["label"] = _PLACEHOLDER
    _section(values, "run")["folder"] = str(runs.absolute())
    config = RunConfig.from_dict(values, source="data.config")
    if missing := missing_machinery(config.sections):
        raise ConfigError("; ".join(missing))
    return Asked(config, config.model.base or str(config.model.source))


def _make_local(values: dict[str, Any]) -> None:
    """Remove settings of the hosted trainer's GPUs and servers; keep the longest context."""
    vllm = _section(values, "vllm")
    rollout = _section(values, "rollout")
    rollout["engine"] = "local"
    if "max_model_len" in vllm:
        rollout.setdefault("max_model_len", vllm["max_model_len"])
    for name in ("compute", "topology", "vllm"):
        values.pop(name, None)


def _sections_in(value: Any) -> dict[str, Any]:
    """Return the sections of a configuration, given as an object or TOML text, in the flat form."""
    if isinstance(value, str):
        try:
            value = tomllib.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"data.config: expected TOML: {error}") from None
    if not isinstance(value, Mapping):
        raise ConfigError("data.config: expected the configuration, as an object or as TOML text")
    flat = flatten(value)
    if flat.problems:
        raise ConfigError("; ".join(f"data.config: {problem.key}: {problem.text}" for problem in flat.problems))
    return flat.values


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    section = values.setdefault(name, {})
    if not isinstance(section, dict):
        raise ConfigError(f"data.config: {name}: expected a table")
    return section


def _text_in(data: Mapping[str, Any], name: str) -> str:
    text = data.get(name)
    if not isinstance(text, str | None):
        raise ConfigError(f"data.{name}: expected a text")
    return text or ""
