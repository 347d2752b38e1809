"""Every exception the library raises on purpose.

Each class is also the standard-library error it refines, so `except ValueError` keeps working::

    GymError
    ├── ConfigError          ValueError    a setting is unknown, out of range or contradicts another
    ├── UnknownNameError     LookupError   no environment, model or policy of that name; names the nearest
    ├── MissingExtraError    ImportError   an optional dependency is not installed; names the extra
    ├── ContractError        ValueError    an environment or tool broke its interface (shape, type, NaN reward)
    ├── TemplateError        ValueError    a chat template cannot be rendered exactly
    ├── ContextOverflowError ValueError    a prompt does not fit the model's context
    ├── RecordError          ValueError    a record's fields contradict each other
    ├── UnscoredError        ValueError    a reward was read before anything scored the episode
    ├── UsageError           RuntimeError  a call at the wrong time: step before reset, a sync call inside an event loop
    ├── EnvError             RuntimeError  an environment raised
    │   ├── EnvTimeoutError  TimeoutError  an environment did not answer before its deadline
    │   ├── EnvDiedError     RuntimeError  an environment ran out of memory, or its process died
    │   └── ActionLimitError RuntimeError  an action exceeded a limit that the environment sets for actions
    ├── EngineError          RuntimeError  an engine failed to generate
    │   ├── EngineTimeoutError   TimeoutError  a generation missed its deadline
    │   ├── EngineLostError      RuntimeError  an engine's process died
    │   ├── EngineMismatchError  RuntimeError  batch after batch, an engine's logprobs are not the learner's
    │   └── EnginePoisonedError  RuntimeError  a weight update failed half-way: nothing sampled may be trained on
    ├── ServiceError         RuntimeError  a process or server that the run needs did not start or broke off
    ├── PlacementError       RuntimeError  the machines that are offered have no room for what a run needs
    ├── RolloutError         RuntimeError  so many episodes failed that the run cannot go on
    ├── StuckError           RuntimeError  batch after batch, all episodes of every group earned the same
    ├── NonFiniteError       ArithmeticError   a loss or gradient was NaN or infinite too many times in a row
    ├── CheckpointError      OSError       a checkpoint is missing, incomplete or of another run
    └── StorageError         OSError       a file or folder cannot be written: no permission, no room, no folder

A failed *episode* is a record (`types.Outcome`), not an exception; a failed *run* is an exception.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GymError(Exception):
    """Base of every exception that this library raises on purpose."""


class ConfigError(GymError, ValueError):
    """A setting is unknown, out of range or contradicts another."""


class UnknownNameError(GymError, LookupError):
    """No registered thing has that name."""


class MissingExtraError(GymError, ImportError):
    """An optional dependency is not installed."""


class ContractError(GymError, ValueError):
    """An environment or tool broke its interface."""


class TemplateError(GymError, ValueError):
    """A chat template cannot be rendered exactly."""


class ContextOverflowError(GymError, ValueError):
    """A prompt does not fit the model's context."""


class RecordError(GymError, ValueError):
    """A record's fields contradict each other."""


class UnscoredError(GymError, ValueError):
    """A reward was read before anything scored the episode."""


class UsageError(GymError, RuntimeError):
    """A call at the wrong time: the object is not in the state that it needs."""


class EnvError(GymError, RuntimeError):
    """An environment raised."""


class EnvTimeoutError(EnvError, TimeoutError):
    """An environment did not answer before its deadline."""


class EnvDiedError(EnvError):
    """An environment ran out of memory, or its worker process died."""


class ActionLimitError(EnvError):
    """An action exceeded a limit that the environment sets for actions; the episode ends and is scored."""


class EngineError(GymError, RuntimeError):
    """An engine failed to generate."""


class EngineTimeoutError(EngineError, TimeoutError):
    """A generation missed its deadline."""


class EngineLostError(EngineError):
    """The engine's process died while it answered, or before, by no doing of the call."""


class EngineMismatchError(EngineError):
    """Batch after batch, an engine's logprobs are not the learner's, although both have the same weights."""


class EnginePoisonedError(EngineError):
    """A weight update failed half-way: nothing this engine samples may be trained on."""


class ServiceError(GymError, RuntimeError):
    """A process or server that the run needs did not start or broke off."""


class PlacementError(GymError, RuntimeError):
    """The machines that are offered have no room for what a run needs; says what is missing, and what is free where."""


class RolloutError(GymError, RuntimeError):
    """So many episodes failed that the run cannot go on."""


class StuckError(GymError, RuntimeError):
    """Batch after batch taught nothing: all episodes of every group earned the same."""


class NonFiniteError(GymError, ArithmeticError):
    """A loss or gradient was NaN or infinite too many times in a row."""


class CheckpointError(GymError, OSError):
    """A checkpoint is missing, incomplete or of another run."""


class StorageError(GymError, OSError):
    """A file or folder cannot be written."""


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Return a hint for a misspelt name: the closest known one, or all of them.

    >>> nearest_name("GuesNumber", ["GuessNumber", "FrozenLake"])
    "did you mean 'GuessNumber'?"
    >>> nearest_name("zzz", ["b", "a"])
    'known: a, b'
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return "known: " + (", ".join(names) if names else "(none)")


def shortened(text: str, max_length: int = 80) -> str:
    """Return a text for an error, cut off at `max_length` characters.

    >>> shortened("abcdefghij", 8)
    'abcde...'
    """
    return text if len(text) <= max_length else text[: max_length - 3] + "..."


def described(value: object) -> str:
    """Return a wrong value for an error: its type, the length of a tuple or list, and the beginning of its repr.

    >>> described(["a", "b"])
    "list of length 2 ['a', 'b']"
    """
    length = f" of length {len(value)}" if isinstance(value, tuple | list) else ""
    try:
        shown = shortened(repr(value))
    except Exception as error:  # the author's own, or an int of more digits than Python writes
        shown = f"(its repr raises {type(error).__name__})"
    return f"{type(value).__name__}{length} {shown}"
