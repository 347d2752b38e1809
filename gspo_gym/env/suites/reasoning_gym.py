"""ReasoningGymEnv: every generator of the reasoning-gym package, one question an episode, scored by the generator.

`make("ReasoningGym", dataset="chain_sum", min_terms=3)`; in a config `rollout.env_name = "ReasoningGym"` with
`rollout.env_config = { dataset = "chain_sum", min_terms = 3 }`.

The process's random generators, lent to one episode at a time.

Packages that draw from the modules `random` and `numpy.random` share one stream among all episodes of a process. Here
an episode has streams of its own, which stand in the place of the global ones while its code runs; afterwards those are
as they were. What draws from them in another thread meanwhile (a library that waits a random time before it tries
again) is still seen by the episode; only a process of its own (`TextEnv.isolation`) keeps that out.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium.error import ResetNeeded

from gspo_gym.env.core import Info, PolicyFactory, ScriptedPolicy, TextEnv
from gspo_gym.env.data.splits import content_hash, is_held_out_content, is_held_out_seed, next_seed
from gspo_gym.env.rewards import Reward
from gspo_gym.errors import ConfigError, EnvError, MissingExtraError, UnknownNameError, nearest_name
from gspo_gym.types import Message

Entry = dict[str, Any]  # Any: "metadata" holds whatever a generator needs to score an answer

_DEFAULT_FRACTION = 0.1
_MAX_DRAWS = 200  # a side with a tenth of the questions is missed with probability 0.9^200 = 7e-10
_NO_ANSWER = "(no answer)"
# Where a right answer is kept by generators whose entries have none under "answer".
_EXAMPLES = ("example_correct_answer", "example_answer", "possible_answer")


@dataclass(frozen=True, slots=True)
class _Source:
    """A generator with its settings; equal ones ask the same questions."""

    name: str
    held_out_fraction: float
    settings_text: str
    settings: Mapping[str, Any] = field(compare=False)

    # Any, here and below: the package is untyped.
    def made(self, seed: int) -> Any:
        """The package's dataset of a seed.

        Raises:
            UnknownNameError, ConfigError: there is no such generator, or it refuses the settings.
        """
        package = _package()
        names = package.factory.DATASETS
        if self.name not in names:
            hint = nearest_name(self.name, names)
            raise UnknownNameError(f"ReasoningGymEnv: there is no dataset {self.name!r}; {hint}")
        try:
            return package.create_dataset(self.name, seed=seed, size=1, **self._converted())
        except (AssertionError, AttributeError, TypeError, ValueError) as error:  # how generators refuse their settings
            raise ConfigError(f"ReasoningGymEnv: {self.name} refused {dict(self.settings)}: {error}") from error

    def entry(self, made: Any, seed: int) -> tuple[Any, Entry]:
        """The entry of a seed, and the dataset that scores it: `made`, if that can give it.

        Entry 7 of seed 0 is entry 0 of seed 7, so one dataset gives them all; some prepare a list, of one here.

        Some also draw from the process's generators (list_functions), or seed them (pool_matrix); they are given their
        own, by the seed.
        """
        with OwnGenerators(seed).in_place():
            try:
                return made, made[seed]
            except IndexError:
                own = self.made(seed)
                return own, own[0]

    def _converted(self) -> dict[str, Any]:
        """The settings; the parts of "composite" may be mappings, as a config file has them."""
        settings = dict(self.settings)
        if self.name == "composite" and "datasets" in settings:
            spec = importlib.import_module("reasoning_gym.composite").DatasetSpec
            settings["datasets"] = [
                spec(**{"weight": 1.0, "config": {}, **part}) if isinstance(part, Mapping) else part
                for part in settings["datasets"]
            ]
        return settings


class ReasoningGymEnv(TextEnv):
    """One generated question an episode; the reward is the generator's `score_answer`, from 0 to 1, unchanged.

    A seed names a question. Which side it belongs to is decided by its text: a question of the wrong side is drawn
    again, so that training (seeds from 2**31 up) never asks what evaluation does. An answer that earns 1 is a success.
    "isomorphic_strings", "polynomial_multiplication" and "ransom_note" (0.1.23) draw from sets, whose order is another
    in each process: for the same questions everywhere, set PYTHONHASHSEED.

    The policy "reference" says the entry's own answer, and exists where that earns 1; "random" the answer of another
    question.

    Args:
        dataset: name of a generator, such as "chain_sum".
        prompt: which of the package's own instructions is the system message: "default", "simple", "direct",
            "chain_of_draft" or "DeepSeekZero". All ask for <answer>...</answer>; of the last such pair the inside is
            scored, and an answer without one is scored as no answer. None: no instructions, and the whole text without
            white space around it is scored.
        held_out_fraction: how many of the questions are for evaluation, in (0, 1); 0.1 by default.
        **generator_config: the generator's own settings, but for `seed` and `size`, which the episode's seed decides.

    Raises:
        MissingExtraError: reasoning-gym is not installed.
        UnknownNameError: there is no such generator or prompt; says the nearest.
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
        # A copy: what a dataset keeps in attributes is its own, and the tables that some load are not loaded again.
        self._made = copy.copy(_loaded(self._source))
        self._entry: Entry | None
        self._scorer, self._entry = self._source.entry(self._made, 0)
        self.policies: Mapping[str, PolicyFactory] = {"random": others_answer}  # type: ignore[misc]  # on the instance
        if self._is_solved():
            self.policies = {"reference": right_answer, **self.policies}  # type: ignore[misc]
        self._entry = None  # no episode is being played

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[tuple[Message, ...], Info]:
        """Asks the question of the seed, or of one drawn as `splits.next_seed` says."""
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
        """Scores the answer; the episode is over."""
        answer = action.strip() if self._instructions is None else self._package.utils.extract_answer(action)
        return self._over(answer)

    def invalid_action(self, error: str) -> tuple[str, Reward, bool, bool, Info]:
        """An answer that could not be read is scored as none."""
        del error
        return self._over(None)

    def right_answer(self) -> str | None:
        """The entry's own answer to the question that is being asked, or None if it has none."""
        entry = self._asked("right_answer")
        found = [entry["answer"], *(entry.get("metadata", {}).get(name) for name in _EXAMPLES)]
        return next((str(answer) for answer in found if answer is not None), None)

    def as_action(self, answer: str) -> str:
        """An answer as the prompt asks for it."""
        return answer if self._instructions is None else f"<answer>{answer}</answer>"

    def another(self, seed: int) -> ReasoningGymEnv:
        """An environment of the same generator that asks another question, the one of this seed."""
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
        """What the generator gives for an answer, and what it raised.

        Some generators raise on answers that they cannot read. That is a wrong answer, and not a failed episode, which
        would be played again without a lesson; unless the generator cannot even score its own answer.
        """
        try:
            return float(self._scorer.score_answer(answer, entry)), {}
        except Exception as error:  # whatever a generator raises
            right = self.right_answer()
            if right is not None and answer != right and self._score(right, entry)[0] > 0:
                return 0.0, {"refused": f"{type(error).__name__}: {error}"}
            raise EnvError(
                f"reasoning-gym {self.dataset_name}: score_answer raised {type(error).__name__}: {error}"
            ) from error

    def _is_solved(self) -> bool:
        """Whether the entry's own answer earns 1."""
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
    """The generator's seed of the first question on the side that the episode's seed asks for; None: there was none."""
    made, draws = copy.copy(_loaded(source)), np.random.default_rng(seed)
    for _ in range(_MAX_DRAWS):
        drawn = int(draws.integers(2**31))
        question = source.entry(made, drawn)[1]["question"]
        if is_held_out_content(content_hash(question, 0), source.held_out_fraction) == is_held_out_seed(seed):
            return drawn
    return None


def right_answer(env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    """The entry's own answer (Any: `PolicyFactory` fixes the type)."""
    return lambda _messages: env.as_action(env.right_answer())


def others_answer(env: Any, rng: np.random.Generator) -> ScriptedPolicy:
    """The own answer of a training question, or none where entries have no answers."""

    def play(_messages: Sequence[Message]) -> str:
        other = env.another(next_seed(rng, is_held_out=False))
        return str(env.as_action(other.right_answer() or _NO_ANSWER))

    return play


def _package() -> Any:
    try:
        package = importlib.import_module("reasoning_gym")
        importlib.import_module("reasoning_gym.utils")
    except ImportError as error:
        raise MissingExtraError(
            "ReasoningGym needs the reasoning-gym package: pip install 'gspo-gym[envs-reasoning-gym]'"
        ) from error
    return package


_MAX_WAIT_SECONDS = 60.0
_in_use = threading.RLock()  # the global generators exist once


class OwnGenerators:
    """The states in which one episode left the two global generators.

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
        """Inside, the global generators are the episode's.

        Raises:
            EnvError: another episode's code has had them for a minute; it hangs, and nobody can take them from it.
        """
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
