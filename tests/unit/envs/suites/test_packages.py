"""A suite whose package cannot be imported says whether it is missing or of another version, and which one works."""

from __future__ import annotations

import importlib
import operator
import sys
from pathlib import Path
from typing import Any

import pytest

from gspo_gym.env.registry import make
from gspo_gym.errors import MissingExtraError, UnknownNameError

# Suite, its arguments, the package, its module, and the versions that pyproject.toml asks for.
SUITES: list[tuple[str, dict[str, Any], str, str, str]] = [
    ("Verifiers", {"env_id": "x"}, "verifiers", "verifiers", "verifiers==0.1.14"),
    ("Gem", {"game": "x"}, "gem-llm", "gem", "gem-llm==0.1.0"),
    ("ReasoningGym", {"dataset": "x"}, "reasoning-gym", "reasoning_gym", "reasoning-gym>=0.1.23"),
    ("SkyRLGym", {"game": "x", "rows": []}, "skyrl-gym", "skyrl_gym", "skyrl-gym>=0.4.0"),
    ("TextArena", {"game": "x"}, "textarena", "textarena", "textarena>=0.7.4"),
]


def describe_package(folder: Path, package: str) -> None:
    """Write the metadata of an installed package, version 99.4.0."""
    about = folder / f"{package.replace('-', '_')}-99.4.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 99.4.0\n")


@pytest.mark.parametrize(("suite", "arguments", "package", "module", "wanted"), SUITES, ids=[row[0] for row in SUITES])
def test_another_version_is_not_called_missing(
    suite: str, arguments: dict[str, Any], package: str, module: str, wanted: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:  # as other tests have left it
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / f"{module}.py").write_text("raise ImportError('cannot import name of another version')")
    describe_package(tmp_path, package)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtraError) as caught:
        make(suite, **arguments)
    message = str(caught.value)
    assert f"needs {wanted}, and {package} 99.4.0 is installed (cannot import name" in message
    assert "not installed" not in message


# What a suite reads from its package, and calls only later.
NAMES = {
    "textarena": ("SinglePlayerState", "make", "envs.registration.ENV_REGISTRY"),
    "gem": ("make", "envs.registration.ENV_REGISTRY"),
    "skyrl_gym": ("make", "register", "envs.registration.registry"),
    "reasoning_gym": ("create_dataset", "factory.DATASETS", "utils.SYSTEM_PROMPTS", "utils.extract_answer"),
    "verifiers": (
        "load_environment", "types.Response", "types.ResponseMessage", "types.ToolCall", "envs.environment.signal",
        "clients.client.Client",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("suite", "arguments", "package", "module", "wanted"), SUITES, ids=[row[0] for row in SUITES])
def test_a_version_without_what_the_suite_reads_is_a_sentence_when_it_is_made(
    suite: str, arguments: dict[str, Any], package: str, module: str, wanted: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    describe_package(tmp_path, package)
    for folder in (tmp_path, *Path(__file__).parent.glob("fake_*")):
        monkeypatch.syspath_prepend(str(folder))
    known = {name: each for name, each in sys.modules.items() if name.partition(".")[0] == module}
    for name in known:
        del sys.modules[name]
    try:
        package_module = importlib.import_module(module)
        if module == "verifiers":  # its parts are not imported with it
            importlib.import_module("verifiers.envs.environment")
            importlib.import_module("verifiers.clients.client")
        for name in NAMES[module]:
            above, _, attribute = name.rpartition(".")
            holder = operator.attrgetter(above)(package_module) if above else package_module
            with monkeypatch.context() as change:
                change.delattr(holder, attribute)
                with pytest.raises(MissingExtraError) as caught:
                    make(suite, **arguments)
            message = str(caught.value)
            assert f"needs {wanted}, and {package} 99.4.0 is installed (" in message
            assert f"has no attribute '{attribute}'" in message
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == module]:
            del sys.modules[name]
        sys.modules.update(known)


def test_discrete_names_gymnasiums_environments() -> None:
    with pytest.raises(UnknownNameError, match="Gymnasium has no environment 'CartPol-v1'; did you mean 'CartPole-v1'"):
        make("Discrete", env="CartPol-v1")
