"""[gateway], [[rollout.mixture]] and services.task_url: what they mean, what is refused, and what goes over what."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from gspo_gym.config.reference import resolved
from gspo_gym.config.run_config import RunConfig, load_config
from gspo_gym.config.sections import TaskSource, with_task_url
from gspo_gym.errors import ConfigError

Problems = Callable[[dict[str, Any]], list[str]]
Make = Callable[[dict[str, Any]], RunConfig]

APP = {"services.task_url": "http://127.0.0.1:8114"}
LAKE = {"env_name": "FrozenLake", "share": 0.25, "env_config": {"size": 4}}
BANK = {"env_name": "bank", "share": 0.5, "task_url": "http://127.0.0.1:8115/"}


def test_one_environment_here_is_the_only_source(make: Make) -> None:
    assert make({"rollout.env_config": {"high": 9}}).sources == (TaskSource("GuessNumber", {"high": 9}),)


def test_a_task_url_makes_the_environment_an_apps(make: Make) -> None:
    (source,) = make(APP).sources
    assert (source.env_name, source.task_url, source.share) == ("GuessNumber", "http://127.0.0.1:8114", 1.0)
    assert source.url_key == "services.task_url"


def test_a_mixture_leaves_the_rest_to_the_main_environment(make: Make) -> None:
    main, lake, bank = make({"rollout.mixture": [LAKE, BANK]}).sources
    assert (main.env_name, main.share, main.task_url) == ("GuessNumber", 0.25, None)
    assert (lake.env_name, lake.share, lake.env_config, lake.task_url) == ("FrozenLake", 0.25, {"size": 4}, None)
    assert (bank.env_name, bank.share, bank.task_url) == ("bank", 0.5, "http://127.0.0.1:8115")
    assert bank.url_key == "rollout.mixture.1.task_url"


def test_a_mixture_is_written_beside_the_run_and_reads_back(make: Make, tmp_path: Path) -> None:
    config = make({"rollout.mixture": [LAKE, BANK], "gateway": {"address": "127.0.0.1:8003"}})
    assert RunConfig.from_dict(tomllib.loads(config.to_toml())) == config
    path = tmp_path / "resolved.toml"
    path.write_text(resolved(config, {}), encoding="utf-8")
    assert load_config(path) == config


def test_a_mixture_is_a_list_of_tables_in_a_file(make: Make, changed: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    text = tomli_w.dumps(changed({})) + '\n[[rollout.mixture]]\nenv_name = "FrozenLake"\nshare = 0.25\n'
    path.write_text(text, encoding="utf-8")
    (_, lake) = load_config(path).sources
    assert (lake.env_name, lake.share) == ("FrozenLake", 0.25)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"rollout.mixture": [LAKE, {**BANK, "share": 0.75}]},
            "rollout.mixture: expected shares below 1 in sum, got 1: rollout.env_name gets the rest, and must get some",
        ),
        (
            {"rollout.mixture": [LAKE, {"env_name": "x"}]},
            "rollout.mixture.1.share: required, but not given: expected a number > 0 and < 1 (fraction of the groups; "
            "all entries' together are below 1)",
        ),
        ({"rollout.mixture": [{**LAKE, "shar": 1}]}, "rollout.mixture.0.shar: unknown key; did you mean 'share'?"),
        ({"rollout.mixture": [{**LAKE, "share": 0}]}, "rollout.mixture.0.share: expected a number > 0 and < 1, got 0"),
        (
            {"rollout.mixture": [{**BANK, "task_url": "http://user:word@host"}]},
            "rollout.mixture.0.task_url: expected a URL that begins with http:// or https:// and holds no user or "
            "password",
        ),
        ({"rollout.mixture": {"a": 1}}, 'rollout.mixture: expected a list of tables, got {"a": 1}'),
        ({"rollout.mixture": ["FrozenLake"]}, 'rollout.mixture.0: expected a list of tables, got "FrozenLake"'),
        (
            {"rollout.mixture": [{**BANK, "api_key": "abc"}]},
            "rollout.mixture.0.api_key: a secret does not belong into a configuration, which is copied beside the run: "
            "set the environment variable API_KEY",
        ),
        (
            {"rollout.mixture": [BANK, {**LAKE, "api_key_env": "LAKE_KEY"}]},
            "rollout.mixture: api_key_env of entry 1 has no effect without a task_url there: give it, or remove this",
        ),
        (
            {"gateway": {"address": "127.0.0.1:8003"}},
            "gateway: has no effect without a task app: give services.task_url, or remove this section",
        ),
        (
            {"gateway": {}, "rollout.mixture": [LAKE]},
            "gateway: has no effect without a task app: give services.task_url, or remove this section",
        ),
        *(
            (
                {**APP, "gateway": {"address": address}},
                f"gateway.address: expected HOST:PORT with a port below 65536, got {address!r}",
            )
            for address in ("127.0.0.1:65536", "127.0.0.1:-1", ":8003", "127.0.0.1", "127.0.0.1:")
        ),
        (
            {**APP, "gateway": {"public_url": "gateway.lan"}},
            "gateway.public_url: expected a URL that begins with http:// or https:// and holds no user or password",
        ),
        *(
            (
                {**APP, "gateway": {"address": f"{host}:0"}},
                f'gateway.address: "{host}" is every address of this machine, and none to call: give '
                "gateway.public_url, too",
            )
            for host in ("0.0.0.0", "::")
        ),
        *(
            (
                {**APP, f"rollout.{name}": value},
                f"rollout.{name}: has no effect where task apps play all episodes: set {default}",
            )
            for name, value, default in (
                ("isolation", "process", '"auto"'),
                ("env_memory_limit_mb", 100, "8192"),
                ("env_variables", ["PATH"], "[]"),
            )
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_or_does_nothing_is_refused(changes: dict[str, Any], line: str, problems: Problems) -> None:
    assert problems(changes) == [line]


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout.mixture": [LAKE, {**BANK, "share": 0.74}]},
        {**APP, "gateway": {"address": "127.0.0.1:0"}},
        {"rollout.mixture": [{**BANK, "api_key_env": "BANK_KEY"}], "gateway": {"address": "localhost:1"}},
        {**APP, "gateway": {"address": "0.0.0.0:0", "public_url": "https://gateway.example.com"}},
        {**APP, "gateway": {"address": "10.0.0.5:0"}},
        # environments here are played beside the app, or for the demonstrations
        {**APP, "rollout.isolation": "process", "rollout.mixture": [LAKE]},
        {**APP, "rollout.isolation": "process", "warmup": {"num_episodes": 8, "learning_rate": 1e-3}},
    ],
)
def test_just_inside_is_fine(changes: dict[str, Any], make: Make) -> None:
    make(changes)


def test_one_wrong_entry_hides_no_other_problem(problems: Problems) -> None:
    lines = problems({"rollout.mixture": [{"share": 2}], "training.batch_size": 24})
    assert [line.split(":")[0] for line in lines] == [
        "rollout.mixture.0.env_name",
        "rollout.mixture.0.share",
        "training.batch_size",
    ]


def test_the_command_line_goes_over_the_environment_and_that_over_the_file(
    changed: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(changed({"services.task_url": "http://file"})), encoding="utf-8")

    def url(overrides: list[str], given: str | None, environment: dict[str, str]) -> str | None:
        return load_config(path, with_task_url(overrides, given, environment)).sources[0].task_url

    variable = {"TASK_APP_URL": "http://variable"}
    assert url([], None, {}) == "http://file"
    assert url([], None, {"TASK_APP_URL": ""}) == "http://file"
    assert url([], None, variable) == "http://variable"
    assert url(["services.task_url=http://override"], None, variable) == "http://override"
    assert url(["services.task_url=http://override"], "http://option", variable) == "http://option"


def test_a_variable_that_holds_no_url_is_named() -> None:
    with pytest.raises(ConfigError, match="environment variable TASK_APP_URL: expected a URL that begins with http"):
        with_task_url([], None, {"TASK_APP_URL": "127.0.0.1:8114"})
