"""`ReasoningGymEnv`: the generators of the reasoning-gym package, one question an episode, scored by the generator.

`make("ReasoningGym", dataset="chain_sum", min_terms=3)`; in a config `rollout.env_name = "ReasoningGym"` with
`rollout.env_config = { dataset = "chain_sum", min_terms = 3 }`.

`OwnGenerators` keeps such packages reproducible: they draw from the modules `random` and `numpy.random`, which all
episodes of a process share.
"""

from __future__ import annotations

import copy
import functools
import json
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gspo_gym_envs.suites.packages import import_package
from gymnasium.error import ResetNeeded

from gspo_gym.env.core import Info, PolicyFactory, ScriptedPolicy, TextEnv
from gspo_gym.env.data.rows import content_hash, is_held_out_content, is_held_out_seed, next_seed
from gspo_gym.env.rewards import Reward
from gspo_gym.errors import ConfigError, EnvError, UnknownNameError, nearest_name
from gspo_gym.types import Message

Entry = dict[str, Any]  # "metadata" holds what a generator needs to score an answer

_DEFAULT_FRACTION = 0.1
_MAX_DRAWS = 200  # a side with a tenth of the questions is missed with probability 0.9^200 = 7e-10
_NO_ANSWER = "(no answer)"
# Keys of a right answer in entries that have none under "answer".
_EXAMPLES = ("example_correct_answer", "example_answer", "possible_answer")


@dataclass(frozen=True, slots=True)
class _Source:
    """A generator with its settings; equal sources ask the same questions."""

    name: str
    held_out_fraction: float
    settings_text: str
    settings: Mapping[str, Any] = field(compare=False)

    def made(self, seed: int) -> Any:
        """Return the package's dataset of a seed, which may refuse the name or the settings."""
        package = _package()
        names = package.factory.DATASETS
        if self.name not in names:
            hint = nearest_name(self.name, names)
            raise UnknownNameError(f"ReasoningGymEnv: there is no dataset {self.name!r}; {hint}")
        try:
            return package.create_dataset(self.name, seed=seed, size=1, **self._converted())
        except (AssertionError, AttributeError, TypeError, ValueError) as error:  # raised for refused settings
            raise ConfigError(f"ReasoningGymEnv: {self.name} refused {dict(self.settings)}: {error}") from error

    def entry(self, made: Any, seed: int) -> tuple[Any, Entry]:
        """Return the entry of a seed and the dataset that scores it, which is `made` if that has the entry."""
        # Entry 7 of seed 0 is entry 0 of seed 7, so one dataset gives all entries; but some datasets prepare a list
        # (of one here) and raise. Some also draw from the process-wide generators (list_functions) or seed them
        # (pool_matrix).
        with OwnGenerators(seed).in_place():
            try:
                return made, made[seed]
            except IndexError:
                own = self.made(seed)
                return own, own[0]

    def _converted(self) -> dict[str, Any]:
        """Return the settings with the parts of "composite", mappings in a config file, as the package's records."""
        settings = dict(self.settings)
        if self.name == "composite" and "datasets" in settings:
            spec = _imported("reasoning_gym.composite:DatasetSpec").DatasetSpec
            settings["datasets"] = [
                spec(**{"weight": 1.0, "config": {}, **part}) if isinstance(part, Mapping) else part
                for part in settings["datasets"]
            ]
        return settings


class ReasoningGymEnv(TextEnv):
    """One generated question an episode; the reward is the generator's `score_answer`, from 0 to 1, unchanged.

    A seed names a question. The text of a question decides its side; questions of the wrong side are drawn again, so
    training (seeds from 2**31 up) never asks an evaluation question. An answer that earns 1 is a success.
    "isomorphic_strings", "polynomial_multiplication" and "ransom_note" (0.1.23) draw from sets, whose order differs
    between processes: set PYTHONHASHSEED to get the same questions.

    The policy "reference" says the entry's own answer, if that earns 1; "random" the answer of another question.

    Args:
        dataset: name of a generator, such as "chain_sum".
        prompt: the package's instructions for the system message: "default", "simple", "direct", "chain_of_draft" or
            "DeepSeekZero". All ask for <answer>...</answer>; the inside of the last such pair is scored, and without
            one there is no answer. None gives no instructions, and scores the stripped text.
        held_out_fraction: fraction of the questions for evaluation, in (0, 1); default 0.1.
        **generator_config: the generator's settings except `seed` and `size`, which follow from the episode's seed.

    Raises:
        MissingExtraError: reasoning-gym is not installed.
        UnknownNameError: there is no such generator or prompt; names the nearest.
        ConfigError: the generator refuses the settings.
    """

    reward_range = (0.0, 1.0)

    def __init__(
        self,
        dataset: str,
        *,
        prompt: str | None = "default",
        held_out_fraction: float = _DEFAULT_FRACTION,
        **generator_config: Any,
    ) -> None:
        if not 0 < held_out_fraction < 1:
            raise ConfigError(f"ReasoningGymEnv: expected held_out_fraction in (0, 1), got {held_out_fraction}")
        for name in {"seed", "size"} & set(generator_config):
            raise ConfigError(
                f"ReasoningGymEnv: {name} has no effect: the episode's seed names the question; remove it"
            )
        self._package = _package()
        self._instructions = self._checked_prompt(prompt)
        settings_text = json.dumps(generator_config, sort_keys=True, default=repr)
        self._source = _Source(dataset, held_out_fraction, settings_text, generator_config)
        self.dataset_name = dataset
        # A shallow copy: a dataset may set attributes on itself, and the tables that some load need not be loaded
        # again.
        self._made = copy.copy(_loaded(self._source))
        self._entry: Entry | None
        self._scorer, self._entry = self._source.entry(self._made, 0)
        self.policies: Mapping[str, PolicyFactory] = {"random": others_answer}  # type: ignore[misc]  # on the instance
        if self._is_solved():
            self.policies = {"reference": right_answer, **self.policies}  # type: ignore[misc]
        self._entry = None  # None between episodes

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[tuple[Message, ...], Info]:
        """Ask the question of the seed, or of one drawn by `splits.next_seed`."""
        super().reset(seed=seed)
        if options:
            raise ConfigError(f"ReasoningGymEnv.reset: expected no options, got {sorted(options)}")
        if seed is None:
            seed = next_seed(self.np_random)
        drawn = _drawn_seed(self._source, seed)
        if drawn is None:
            side = "held-out" if is_held_out_seed(seed) else "training"
            raise ConfigError(
                f"ReasoningGymEnv: {_MAX_DRAWS} draws from {self.dataset_name!r} gave no {side} question: it has too "
                "few; change held_out_fraction"
            )
        self._scorer, self._entry = self._source.entry(self._made, drawn)
        question = Message("user", self._entry["question"])
        messages = (question,) if self._instructions is None else (Message("system", self._instructions), question)
        return messages, {"dataset": self.dataset_name}

    def step(self, action: str) -> tuple[str, Reward, bool, bool, Info]:
        """Score the answer and end the episode."""
        answer = action.strip() if self._instructions is None else self._package.utils.extract_answer(action)
        return self._over(answer)

    def invalid_action(self, error: str) -> tuple[str, Reward, bool, bool, Info]:
        """Score no answer and end the episode."""
        del error
        return self._over(None)

    def right_answer(self) -> str | None:
        """Return the current entry's own answer, or None if it has none."""
        entry = self._asked("right_answer")
        found = [entry["answer"], *(entry.get("metadata", {}).get(name) for name in _EXAMPLES)]
        return next((str(answer) for answer in found if answer is not None), None)

    def as_action(self, answer: str) -> str:
        """Return an answer in the form that the prompt asks for."""
        return answer if self._instructions is None else f"<answer>{answer}</answer>"

    def another(self, seed: int) -> ReasoningGymEnv:
        """Return an environment of the same generator with the question of `seed`."""
        other = copy.copy(self)
        other.reset(seed=seed)
        return other

    def _asked(self, method: str) -> Entry:
        if self._entry is None:
            raise ResetNeeded(f"ReasoningGymEnv.{method}: no episode is being played; call reset first")
        return self._entry

    def _over(self, answer: str | None) -> tuple[str, Reward, bool, bool, Info]:
        score, refused = self._score(answer, self._asked("step"))
        self._entry = None
        return "", Reward({"score": score}, success=score >= 1.0), True, False, {"answer": answer} | refused

    def _score(self, answer: str | None, entry: Entry) -> tuple[float, Info]:
        try:
            return float(self._scorer.score_answer(answer, entry)), {}
        except Exception as error:  # generators may raise anything
            # A generator that scores its own answer but not this one finds it unreadable, which is wrong. A failed
            # episode would be played again, and the model would not learn from it.
            right = self.right_answer()
            if right is not None and answer != right and self._score(right, entry)[0] > 0:
                return 0.0, {"refused": f"{type(error).__name__}: {error}"}
            raise EnvError(
                f"reasoning-gym {self.dataset_name}: score_answer raised {type(error).__name__}: {error}"
            ) from error

    def _is_solved(self) -> bool:  # the entry's own answer earns 1
        right = self.right_answer()
        return right is not None and self._score(right, self._asked("reset"))[0] >= 1.0

    def _checked_prompt(self, prompt: str | None) -> str | None:
        prompts: Mapping[str, str] = self._package.utils.SYSTEM_PROMPTS
        if prompt is not None and prompt not in prompts:
            raise UnknownNameError(f"ReasoningGymEnv: there is no prompt {prompt!r}; {nearest_name(prompt, prompts)}")
        return None if prompt is None else prompts[prompt]


@functools.lru_cache(maxsize=16)
def _loaded(source: _Source) -> Any:
    return source.made(0)


@functools.lru_cache(maxsize=4096)  # a group plays one seed many times, and some generators take a tenth of a second
def _drawn_seed(source: _Source, seed: int) -> int | None:
    """Return the generator's seed of the first question on the side of the episode's seed; None if none was drawn."""
    made, draws = copy.copy(_loaded(source)), np.random.default_rng(seed)
    for _ in range(_MAX_DRAWS):
        drawn = int(draws.integers(2**31))
        question = source.entry(made, drawn)[1]["question"]
        if is_held_out_content(content_hash(question, 0), source.held_out_fraction) == is_held_out_seed(seed):
            return drawn
    return None


def right_answer(env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    """Return a player that says the entry's own answer."""
    return lambda _messages: env.as_action(env.right_answer())


def others_answer(env: Any, rng: np.random.Generator) -> ScriptedPolicy:
    """Return a player that says the answers of training questions, or a placeholder if entries have no answers."""

    def play(_messages: Sequence[Message]) -> str:
        other = env.another(next_seed(rng, is_held_out=False))
        return str(env.as_action(other.right_answer() or _NO_ANSWER))

    return play


def _package() -> Any:
    names = ("create_dataset", "factory.DATASETS", "utils.SYSTEM_PROMPTS", "utils.extract_answer")
    return _imported("reasoning_gym", "reasoning_gym.utils", *[f"reasoning_gym:{name}" for name in names])


def _imported(*modules: str) -> Any:
    return import_package("ReasoningGym", "reasoning-gym", *modules, extra="envs-reasoning-gym")


_MAX_WAIT_SECONDS = 60.0
_in_use = threading.RLock()  # the process has one pair of generators


class OwnGenerators:
    """An episode's own states of the two process-wide generators.

    Draws of another thread inside `in_place` (a library that waits a random time before a retry) still advance the
    episode's states; only `TextEnv.isolation` "process" keeps them out.

    >>> mine, before = OwnGenerators(0), random.getstate()
    >>> with mine.in_place():
    ...     first = random.random()
    >>> random.getstate() == before, first == random.Random(0).random()
    (True, True)
    """

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed % 2**32).get_state(legacy=True)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the episode's states in place of the process-wide ones during the block."""
        # Held for a minute by another episode, they are lost: its code hangs and cannot be stopped.
        if not _in_use.acquire(timeout=_MAX_WAIT_SECONDS):
            raise EnvError(
                f"another environment of this process has not returned for {_MAX_WAIT_SECONDS:g} seconds, and this one "
                'needs the random generators that it uses; run such environments with isolation "process"'
            )
        try:
            python, numpy = random.getstate(), np.random.get_state(legacy=True)
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            try:
                yield
            finally:
                self._python, self._numpy = random.getstate(), np.random.get_state(legacy=True)
                random.setstate(python)
                np.random.set_state(numpy)
        finally:
            _in_use.release()
