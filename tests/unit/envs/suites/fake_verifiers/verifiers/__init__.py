"""A stand-in for the package verifiers, as version 0.1.14 behaves where an adapter meets it."""

import importlib

from . import types  # noqa: F401
from .clients import client  # noqa: F401
from .envs.environment import MultiTurnEnv, Rubric, RubricGroup  # noqa: F401
from .errors import Error, ModelError, OverlongPromptError  # noqa: F401


def load_environment(env_id, **env_args):
    """As the real one: a module of that name with a function of this name; any failure is a RuntimeError."""
    try:
        return importlib.import_module(env_id.replace("-", "_")).load_environment(**env_args)
    except ImportError as error:
        raise ValueError(f"Could not import '{env_id}' environment.") from error
    except Exception as error:
        raise RuntimeError(f"Failed to load environment '{env_id}': {error}") from error
