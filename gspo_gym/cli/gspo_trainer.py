"""`GSPOTrainer`: train from Python on an environment or a data set, with defaults for everything else."""

from __future__ import annotations

import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import gymnasium
from rich.console import Console

from gspo_gym.cli.command_line import ENDPOINT, SCRIPTED, base_of
from gspo_gym.cli.evaluate import run_evaluation
from gspo_gym.cli.models import export_model
from gspo_gym.cli.notebook import Run, open_run
from gspo_gym.cli.train import run_training
from gspo_gym.config.foreign.readings import label_of
from gspo_gym.config.run_config import RunConfig
from gspo_gym.env.data.dataset import DatasetEnv
from gspo_gym.env.data.rows import read_rows
from gspo_gym.env.registry import register
from gspo_gym.env.rewards import KeywordFunction
from gspo_gym.errors import CheckpointError, ConfigError, UsageError
from gspo_gym.rollout.evaluation import KeptRows
from gspo_gym.run.report.progress import counting

if TYPE_CHECKING:
    from gspo_gym.remote.serve.agent_app import AgentApp
    from gspo_gym.rollout.evaluation import Evaluation
    from gspo_gym.run.callbacks import Callback
    from gspo_gym.run.sinks import Sink

AnyRows = str | Sequence[Mapping[str, Any]]  # Any: values of the rows

_ENDPOINT_LIMITS = {"max_output_tokens": 1024, "max_model_len": 16_384}  # of a model that is wordy, and not here
_TINY = "tiny:qwen3-64-v2"
_TASK_URL = "http://127.0.0.1:8000"  # where `gspo-gym app serve` serves


class GSPOTrainer:
    """Trains a model on an environment, or on the rows of a data set with reward functions.

    What is not given is chosen as `gspo-gym config new` does, for this model, environment and machine. All that a
    configuration can say goes into `args`, by section and key; `config` holds the result, and `config.to_toml()` is the
    file with which `gspo-gym train` does the same.

    Args:
        model: as `model.base`: a hub id, a folder, a GGUF file, "smollm2", or "tiny:NAME" for random weights.
        env: a registered name, or a class or function that returns a fresh environment, or an agent, as
            `agent_app(rollout)`, which is served in this process while it is trained or evaluated. A class or function
            of a module is recorded as MODULE:NAME, which commands in the same folder find; one of the script itself
            is known in this process only.
        reward_funcs: with `train_dataset`: a function or several, whose rewards are added. Each takes `completion` and
            any columns by name and returns a number or a bool; one that takes `completions` is called as TRL does, with
            lists of one.
        train_dataset, eval_dataset: rows with a column "question" or "prompt"; see `DatasetEnv`. Without
            `eval_dataset` a tenth of the rows is held out.
        args: keys over the defaults, nested ({"training": {"learning_rate": 1e-4}}) or dotted
            ({"training.learning_rate": 1e-4}).
        callbacks: one or several; called with a `StepReport` after each step and evaluation.
        loggers: "tensorboard", "wandb", "trackio" or "mlflow", or objects of `gspo_gym.Sink`, which `train` closes at
            its end. The run's folder has all numbers without them.
        label: the run's name.
        set_aside: move an earlier run of the same label away; if False, its presence is an error.

    Raises:
        UsageError: neither or both of `env` and `train_dataset` are given, or reward functions without rows.
        ConfigError: a key or a value is wrong; the rows cannot be read.

    >>> trainer = GSPOTrainer(
    ...     model="tiny:qwen3-64-v2",
    ...     train_dataset=[{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(20)],
    ...     reward_funcs=lambda completion, answer: answer in completion,
    ...     args={"training.iterations_per_epoch": 5},
    ... )
    >>> trainer.config.training.iterations_per_epoch, trainer.config.rollout.max_turns
    (5, 1)
    """

    def __init__(
        self,
        model: str = _TINY,
        env: str | Callable[..., Any] | AgentApp | None = None,
        *,
        reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]] = (),
        train_dataset: AnyRows | None = None,
        eval_dataset: AnyRows | None = None,
        args: Mapping[str, Any] | None = None,
        callbacks: Callback | Sequence[Callback] = (),
        loggers: str | Sink | Sequence[str | Sink] = (),
        label: str | None = None,
        set_aside: bool = True,
    ) -> None:
        from gspo_gym.config.build.first_run import first_run, first_run_of_app  # loads torch

        functions = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
        if (env is None) == (train_dataset is None):
            given = "neither" if env is None else "both"
            raise UsageError(f"GSPOTrainer: expected either env or train_dataset, got {given}")
        if train_dataset is None and (functions or eval_dataset is not None):
            raise UsageError(
                "GSPOTrainer: reward_funcs and eval_dataset go with train_dataset, not with env, whose step returns "
                "the rewards: return a Reward with a term for each function"
            )
        if train_dataset is not None:
            env = _dataset_env(train_dataset, eval_dataset, functions)
        if isinstance(env, gymnasium.Env):
            raise UsageError(
                f"GSPOTrainer: env is a name, a class or a function, not one {type(env).__name__}: many play"
            )
        if not isinstance(args, Mapping | None):
            raise UsageError(
                f'GSPOTrainer: args: expected a mapping such as {{"training.group_size": 8}}, got {args!r}'
            )
        self._callbacks: tuple[Callback, ...] = (callbacks,) if callable(callbacks) else tuple(callbacks)
        for callback in self._callbacks:
            if not callable(callback):
                raise UsageError(f"GSPOTrainer: callbacks: expected functions of a StepReport, got {callback!r}")
        overrides = _nested(args or {})
        rollout = overrides.get("rollout", {})
        all_loggers = list(loggers) if isinstance(loggers, list | tuple) else [loggers]
        self._sinks = tuple(_checked_sink(logger) for logger in all_loggers if not isinstance(logger, str))
        if names := [logger for logger in all_loggers if isinstance(logger, str)]:
            overrides = _merged({"tracking": {"report_to": names}}, overrides)
        self._app = env if _is_app(env) else None
        if self._app is not None:
            limits = {name: rollout.get(name) for name in ("max_turns", "max_output_tokens")}
            name = self._app.name
            sections = first_run_of_app(name, model=model, label=label or label_of(name).lower(), **limits)
            sections["services"] = {"task_url": _TASK_URL}
        else:
            name = env if isinstance(env, str) else _registered(env)
            options = rollout.get("env_config")
            sections = first_run(name, model=model, label=label or label_of(name).lower(), options=options).sections
        below = _without_what_follows(_nested(sections), overrides)
        self.config = RunConfig.from_dict(_merged(below, overrides), source="GSPOTrainer")
        self._set_aside = set_aside

    def train(self, *, resume: bool = False) -> dict[str, Any]:
        """Train, with progress on the terminal or in the notebook; return the contents of the run's summary.json.

        Args:
            resume: go on from the newest checkpoint of the run.

        Raises:
            ConfigError: this machine cannot do it. GymError: the run cannot go on; its folder holds all up to then.
            Exception: what a callback raised, after the run was saved.
        """
        set_aside = self._set_aside and not resume
        with self._served() as config:
            return run_training(
                config,
                resume=resume,
                set_aside=set_aside,
                console=Console(),
                callbacks=self._callbacks,
                sinks=self._sinks,
            )

    @property
    def run(self) -> Run:
        """Return the run to look at, also while it goes on: curves, episodes, tokens.

        Raises:
            CheckpointError: nothing was trained yet.
        """
        self._require_trained()
        return open_run(self.config.run_folder)

    def evaluate(self, seeds: str | Sequence[int] | None = None, *, model: str | None = None) -> Evaluation:
        """Play held-out episodes with what was trained, or with another model.

        Args:
            seeds: such as "0:100", or integers; None: those of the configuration.
            model: as `run_evaluation`; None: the newest checkpoint.

        Raises:
            CheckpointError: `model` is None, and nothing was trained yet.
        """
        if model is None:
            self._require_trained()
        with self._served() as config:
            if seeds is not None:
                given = seeds if isinstance(seeds, str) else list(seeds)
                config = _changed(config, {"evaluation": {"seeds": given}}, source="evaluate")
            with counting(Console(stderr=True), config.num_evaluation_episodes) as count:
                rows = KeptRows(add=lambda _row, _episode: count())
                return run_evaluation(config, model or str(config.run_folder), rows=rows)

    def _require_trained(self) -> None:
        if not self.config.run_folder.is_dir():
            raise CheckpointError(f"{self.config.run_folder}: nothing was trained yet; call train() first")

    @contextmanager
    def _served(self) -> Iterator[RunConfig]:
        """Serve the agent, if it is one, in the block; yield the configuration that reaches it."""
        if self._app is None:
            yield self.config
            return
        from gspo_gym.remote.serving import BackgroundServer  # of the extra `serve`, as the agent is

        with BackgroundServer(self._app) as server:
            yield _changed(self.config, {"services": {"task_url": server.url}}, source="GSPOTrainer")

    def save(self, folder: str | Path) -> Path:
        """Write the newest checkpoint in the layout of transformers or PEFT, with a model card; return the folder.

        Raises:
            CheckpointError: nothing was trained yet. StorageError: the folder cannot be written.
        """
        self._require_trained()
        export_model(str(self.config.run_folder), Path(folder), runs=Path(self.config.run.folder))
        return Path(folder)

    def push_to_hub(self, repo: str, folder: str | Path, *, is_private: bool = True, token: str | None = None) -> str:
        """Save into `folder`, push it to the hub as OWNER/NAME, and return its URL; `token` None: that of the login."""
        from gspo_gym.policy.export import push

        return push(self.save(folder), repo, is_private=is_private, token=token)


def evaluate(
    env: str | Callable[..., Any] | AgentApp,
    model: str = "scripted:reference",
    seeds: str | Sequence[int] = "0:100",
    *,
    args: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Play seeded episodes of an environment and return what they came to, with intervals; nothing is trained or saved.

    Two results over the same seeds are compared in pairs with `gspo_gym.rollout.comparison.compare`. The limits of an
    episode are those that `GSPOTrainer` chooses; a config file's are those of `gspo-gym evaluate`.

    Args:
        env: as for `GSPOTrainer`.
        model: a run, a folder, a hub id, "smollm2", "tiny:NAME", `scripted:NAME` for a player of the environment's own,
            or `openai:MODEL[@URL]`.
        seeds: which tasks, such as "0:100" or range(100); held out below 2**31.
        args: keys over the defaults, as for `GSPOTrainer`, such as {"rollout.max_output_tokens": 512}.

    Raises:
        UnknownNameError: there is no such environment, model or player.
        RolloutError: no episode could be scored.

    >>> evaluate("GuessNumber", "scripted:reference", "0:20").success_rate
    1.0
    """
    is_model = not model.startswith((SCRIPTED, ENDPOINT))
    if model.startswith(ENDPOINT):
        args = _merged({"rollout": _ENDPOINT_LIMITS}, _nested(args or {}))
    base = base_of(model) if is_model else _TINY
    return GSPOTrainer(base, env, args=args).evaluate(seeds, model=base if is_model else model)


def _dataset_env(
    rows: AnyRows, held_out: AnyRows | None, functions: Sequence[Callable[..., Any]]
) -> Callable[..., Any]:
    """Return a maker of environments which share the rows."""
    if not functions:
        raise UsageError("GSPOTrainer: train_dataset needs reward_funcs, which say what an answer is worth")
    column = "question"
    if isinstance(rows, str):
        first = next((row.values for row in read_rows(rows)), {})
    else:
        first = rows[0] if len(rows) else {}
    if first and column not in first:
        column = "prompt"
        if not isinstance(first.get(column), str):
            raise ConfigError(
                f'train_dataset: expected a column "question" or "prompt" with text, got {sorted(first)}; '
                "for conversations make a DatasetEnv and give it as env"
            )
    return DatasetEnv(
        rows=rows if isinstance(rows, str) else list(rows),
        held_out=held_out if held_out is None or isinstance(held_out, str) else list(held_out),
        reward=functions[0] if len(functions) == 1 and not _takes_lists(functions[0]) else _summed(functions),
        conversation=[{"role": "user", "content": f"{{{column}}}"}],
    ).another


def _checked_sink(logger: Any) -> Sink:  # Any: an object with the methods is as good as a subclass
    missing = [name for name in ("name", "write", "episodes", "report", "close") if not hasattr(logger, name)]
    if missing:
        raise UsageError(
            f"GSPOTrainer: a logger is a name or an object of gspo_gym.Sink; {type(logger).__name__} lacks "
            f"{', '.join(missing)}: make it a subclass, which needs no more than write(step, values)"
        )
    sink: Sink = logger
    return sink


def _is_app(env: object) -> TypeGuard[AgentApp]:
    module = sys.modules.get("gspo_gym.remote.serve.agent_app")  # which has made it, if it is one
    return module is not None and isinstance(env, module.AgentApp)


def _changed(config: RunConfig, overrides: Mapping[str, Any], *, source: str) -> RunConfig:
    return RunConfig.from_dict(_merged(config.model_dump(exclude_none=True), overrides), source=source)


def _takes_lists(function: Callable[..., Any]) -> bool:
    return "completions" in inspect.signature(function).parameters


def _summed(functions: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """Return one function whose answer has each of theirs by name; it is async if one of them is."""
    calls: dict[str, KeywordFunction] = {}
    for index, function in enumerate(functions):
        name = getattr(function, "__name__", "reward").strip("<>")
        name = f"{name}_{index}" if name in calls else name
        calls[name] = KeywordFunction.of(function, f"reward_funcs[{index}]")

    def ask(call: KeywordFunction, completion: str, row: Mapping[str, Any]) -> Any:
        if "completions" not in call.required:
            return call({**row, "completion": completion})
        lists = {"completions": [completion], "prompts": [row.get("prompt", row.get("question"))]}
        return call(lists | {name: [value] for name, value in row.items()})

    def added(answers: Mapping[str, Any]) -> dict[str, float] | None:
        scores = {name: score[0] if "completions" in calls[name].required else score for name, score in answers.items()}
        # A function that answers None does not apply to this row, as in TRL.
        return {name: float(score) for name, score in scores.items() if score is not None} or None

    def summed(completion: str, **row: Any) -> dict[str, float] | None:
        return added({name: ask(call, completion, row) for name, call in calls.items()})

    async def summed_soon(completion: str, **row: Any) -> dict[str, float] | None:
        answers = {}
        for name, call in calls.items():
            answer = ask(call, completion, row)
            answers[name] = await answer if call.is_async else answer
        return added(answers)

    total: Callable[..., Any] = summed_soon if any(call.is_async for call in calls.values()) else summed
    names = {name for call in calls.values() for name in call.required} - {"completion", "completions", "prompts"}
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, kind) for name in ("completion", *sorted(names))]
    total.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # the columns that the rows must have
        [*parameters, inspect.Parameter("row", inspect.Parameter.VAR_KEYWORD)]
    )
    return total


def _registered(make: Callable[..., Any] | None) -> str:
    assert make is not None
    owner = getattr(make, "__self__", None)
    maker: Any = make if owner is None else type(owner)
    name = re.sub(r"\W", "", getattr(maker, "__name__", type(maker).__name__))
    module = getattr(make, "__module__", "__main__")
    if module != "__main__" and getattr(sys.modules.get(module), name, None) is make:
        return f"{module}:{name}"  # which commands in other processes find, too
    # A version of its own: an earlier trainer's configuration still means its environment.
    env_id = next(new for n in itertools.count() if (new := f"{name or 'Env'}-v{n}") not in gymnasium.registry)
    register(env_id, entry_point=make)
    return env_id


def _without_what_follows(sections: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a first run's sections without its choices for an objective that `overrides` replace.

    The caller did not set them and could not remove them; what the other objective has there follows from it.
    """

    def given(section: str, name: str, default: Any) -> Any:
        table = overrides.get(section)
        return table.get(name, default) if isinstance(table, Mapping) else default

    learns_from_rewards = given("distillation", "reward", True)
    has_clip = given("loss", "surrogate", "clip") == "clip" and learns_from_rewards
    has_level = given("algorithm", "variety", None) is None and learns_from_rewards
    dropped: dict[str, tuple[str, ...]] = {
        "loss": () if has_clip else ("clip_low", "clip_high"),
        "advantages": () if has_level else ("level",),
    }
    return {
        section: {name: value for name, value in table.items() if name not in dropped.get(section, ())}
        for section, table in sections.items()
    }


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables in tables; names with dots are paths."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        head, _, rest = name.partition(".")
        if rest:
            value = _nested({rest: value})
        nested = _merged(nested, {head: value})
    return nested


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return both, tables in tables; `above` wins."""
    merged = dict(below)
    for name, value in above.items():
        both_are_tables = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _merged(merged[name], value) if both_are_tables else value
    return merged
