"""Names of environments: what they resolve to, and what is said of wrong ones."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from functools import partial
from importlib.metadata import EntryPoint
from typing import Any

import gymnasium
import pytest

from gspo_gym.env import registry
from gspo_gym.env.core import TextEnv
from gspo_gym.env.registry import list_environments, make, register, resolve
from gspo_gym.env.workers.isolation import isolated_factory
from gspo_gym.errors import ConfigError, UnknownNameError


class Talk(TextEnv):
    def __init__(self, *, depth: int = 1) -> None:
        self.depth = depth

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return "hi", {}

    def step(self, action: str) -> Any:
        return "go on", 0.0, False, False, {}


class Plain:
    """No gymnasium.Env."""

    def __init__(self, depth: int = 1) -> None:
        self.depth = depth

    def reset(self, *, seed: int) -> Any:
        return "hi", {}

    def step(self, action: str) -> Any:
        return "bye", 1.0, True, False, {}


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    list_environments()  # plugins are loaded once in a process
    kept = dict(gymnasium.registry)
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(kept)


@pytest.mark.parametrize("name", ["GuessNumber", "GuessNumber-v0", "gspo_gym/GuessNumber", "gspo_gym/GuessNumber-v0"])
def test_a_bundled_environment_has_short_names(name: str) -> None:
    assert resolve(name) == "gspo_gym/GuessNumber-v0"


def test_ours_comes_before_gymnasiums_of_the_same_name() -> None:
    assert "FrozenLake-v1" in gymnasium.registry
    assert resolve("FrozenLake") == "gspo_gym/FrozenLake-v0"
    assert resolve("FrozenLake-v1") == "FrozenLake-v1"  # a full id is what it says


def test_a_strangers_comes_before_gymnasiums_of_the_same_name() -> None:
    register("cards/Blackjack-v7", Talk)
    assert resolve("Blackjack") == "cards/Blackjack-v7"
    assert resolve("Blackjack-v1") == "Blackjack-v1"


def test_the_newest_version_is_taken_as_a_number() -> None:
    for version in (2, 10, 9):
        register(f"mine/Talk-v{version}", Talk)
    assert resolve("Talk") == "mine/Talk-v10"
    assert resolve("mine/Talk") == "mine/Talk-v10"
    assert resolve("Talk-v2") == "mine/Talk-v2"


def test_a_name_in_two_namespaces_is_ambiguous() -> None:
    register("mine/Talk-v0", Talk)
    register("yours/Talk-v0", Talk)
    with pytest.raises(UnknownNameError, match=r"in several namespaces: mine/Talk-v0, yours/Talk-v0; give the full id"):
        resolve("Talk")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("GuesNumber", "did you mean 'GuessNumber'?"),
        ("GuessNumber-v7", "did you mean 'GuessNumber-v0'?"),
        ("gspogym/GuessNumber-v0", "did you mean 'gspo_gym/GuessNumber-v0'?"),
    ],
)
def test_an_unknown_name_gets_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        resolve(name)
    assert str(caught.value) == f"there is no environment {name!r}; {hint}"


@pytest.mark.parametrize("name", ["xyzzy", "not an id!"])
def test_a_name_that_is_near_to_none_gets_all_of_them(name: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        resolve(name)
    before, _, known = str(caught.value).partition("; known: ")
    assert before == f"there is no environment {name!r}"
    assert known.split(", ") == sorted({*known.split(", "), "Dataset", "FrozenLake", "GuessNumber", "SqlAnalyst"})


def test_a_module_is_imported_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_module_of_envs", types.ModuleType("my_module_of_envs"))
    register("Talk-v3", Talk)
    assert resolve("my_module_of_envs:Talk-v3") == "Talk-v3"
    assert resolve("my_module_of_envs:Talk") == "Talk-v3"
    with pytest.raises(UnknownNameError, match="cannot import 'no_such_module': No module named 'no_such_module'"):
        resolve("no_such_module:Talk-v3")


def module_of(monkeypatch: pytest.MonkeyPatch, **names: Any) -> None:
    module = types.ModuleType("my_module_of_envs")
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_a_class_that_nobody_registered_is_made_by_its_module_and_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module_of(monkeypatch, Chat=Talk, Plain=Plain, made=lambda depth=3: Talk(depth=depth))
    env_id = resolve("my_module_of_envs:Chat")
    assert env_id == resolve(env_id) == "my_module_of_envs:Chat"
    assert make(env_id, depth=2).unwrapped.depth == 2
    assert make("my_module_of_envs:made").unwrapped.depth == 3
    assert make("my_module_of_envs:Plain").depth == 1
    with pytest.raises(ConfigError, match="takes no argument 'deep'"):
        make(env_id, deep=2)
    with pytest.raises(UnknownNameError, match="there is no environment 'my_module_of_envs:Chatt'"):
        resolve("my_module_of_envs:Chatt")


def test_a_class_of_a_module_comes_before_a_bundled_environment_of_the_same_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module_of(monkeypatch, GuessNumber=Talk)
    assert isinstance(make("my_module_of_envs:GuessNumber").unwrapped, Talk)
    assert resolve("GuessNumber") == "gspo_gym/GuessNumber-v0"


def test_a_class_that_its_module_registers_has_the_id_and_the_arguments_of_its_registration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module_of(monkeypatch, Talk=Talk)
    register("lab/Talking-v1", Talk, kwargs={"depth": 7})
    register("lab/Talking-v2", Talk, kwargs={"depth": 8})
    assert resolve("my_module_of_envs:Talk") == "lab/Talking-v2"
    assert make("my_module_of_envs:Talk").unwrapped.depth == 8


def test_a_plugin_that_fails_is_named_when_a_lookup_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("broken_plugin", "no_such_module:register", "gymnasium.envs")
    monkeypatch.setattr(registry.importlib.metadata, "entry_points", lambda group: [broken])
    registry._load_plugins.cache_clear()
    try:
        assert resolve("GuessNumber") == "gspo_gym/GuessNumber-v0"  # registered already, and not kept from it
        with pytest.raises(UnknownNameError, match="; the plugin broken_plugin could not be loaded: ModuleNot"):
            resolve("xyzzy")
    finally:
        registry._load_plugins.cache_clear()


def test_make_gives_the_bare_environment_with_the_arguments() -> None:
    register("mine/Talk-v0", Talk, kwargs={"depth": 2})
    assert type(make("Talk")) is Talk
    assert (make("Talk").depth, make("Talk", depth=5).depth) == (2, 5)
    assert make("Talk") is not make("Talk")
    assert make("Talk").spec.id == "mine/Talk-v0"


def test_a_time_limit_is_kept() -> None:
    register("mine/Talk-v0", Talk, max_episode_steps=2)
    env = make("Talk")
    env.reset(seed=0)
    assert [env.step("x")[3] for _ in range(2)] == [False, True]
    assert type(env.unwrapped) is Talk


def test_gymnasiums_checkers_are_left_out_even_where_they_were_asked_for() -> None:
    gymnasium.register("mine/Talk-v0", entry_point=Talk)
    assert type(make("Talk")) is Talk


def test_a_plain_class_can_be_registered() -> None:
    register("mine/Plain-v0", Plain, kwargs={"depth": 2})
    assert type(make("Plain")) is Plain
    assert make("Plain", depth=3).depth == 3
    register("mine/Plain-v0", Plain, max_episode_steps=2)
    with pytest.raises(ConfigError, match=r"max_episode_steps needs a subclass of gymnasium\.Env, got Plain"):
        make("Plain")


def test_an_unknown_argument_gets_the_nearest() -> None:
    register("mine/Talk-v0", Talk)
    with pytest.raises(ConfigError, match=r"'mine/Talk-v0' takes no argument 'dept'; did you mean 'depth'\?"):
        make("Talk", dept=3)


class Deep(Talk):
    def __init__(self, depth: int, *args: Any, floor: int, **more: Any) -> None:
        super().__init__(depth=depth + floor)


def test_an_argument_that_is_needed_is_asked_for_by_name() -> None:
    register("mine/Deep-v0", Deep)
    for kwargs, missing in (({"floor": 1}, "depth"), ({"depth": 1, "other": 2}, "floor")):
        starts = partial(make, "Deep", **kwargs), partial(isolated_factory, "Deep", kwargs, "thread")
        for start in starts:
            with pytest.raises(
                ConfigError, match=f"'mine/Deep-v0' needs an argument '{missing}': .*--option {missing}="
            ):
                start()
    register("mine/Deep-v0", Deep, kwargs={"floor": 1})
    assert make("Deep", depth=2).unwrapped.depth == 3
    assert isolated_factory("Deep", {"depth": 2}, "thread")().unwrapped.depth == 3


def test_a_later_registration_replaces_without_a_warning() -> None:
    register("mine/Talk-v0", Plain)
    register("mine/Talk-v0", Talk)
    assert type(make("Talk")) is Talk


def test_a_malformed_id_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot register environment 'not an id!'"):
        register("not an id!", Talk)


def test_the_list_leaves_out_gymnasiums_own() -> None:
    register("mine/Talk-v0", Talk)
    listed = list_environments()
    assert "mine/Talk-v0" in listed
    assert "gspo_gym/GuessNumber-v0" in listed
    assert "CartPole-v1" not in listed
    assert "CartPole-v1" in list_environments(include_gymnasium=True)


def test_gymnasium_make_finds_ours_through_the_module() -> None:
    assert gymnasium.make("gspo_gym_envs:gspo_gym/GuessNumber-v0").spec.id == "gspo_gym/GuessNumber-v0"
