"""The commands, as somebody types them.

Pinned here: exit statuses (0 fine, 1 a failed check, 2 a mistake of the caller's), one clear message instead of a
traceback, what --json writes, and what `env play` shows.
"""

import argparse
import ast
import json
import subprocess
import sys
from importlib.metadata import distribution, distributions
from pathlib import Path

import gymnasium
import pytest
from gspo_gym_envs import OWN, SUITES

from gspo_gym.cli import env as env_commands
from gspo_gym.cli.command_line import parse_and_run
from gspo_gym.cli.main import command_parser, main
from gspo_gym.env.core import TextEnv
from gspo_gym.env.registry import Entry, entry_of, register

ROOT = Path(__file__).parents[3]
QUICKSTART = str(ROOT / "configs" / "quickstart.toml")


class Constant(TextEnv):
    """Breaks the contract: the same reward whatever is done, and a policy that cannot be better than silence."""

    policies = {"reference": lambda env, rng: lambda messages: "x"}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "hello", {}

    def step(self, action):
        return "bye", 1.0, True, False, {}


def test_an_unknown_key_is_answered_with_the_nearest_and_status_2(capsys):
    assert main(["train", QUICKSTART, "training.learning_rat=1e-3"]) == 2
    error = capsys.readouterr().err
    assert "training.learning_rat" in error
    assert "learning_rate" in error
    assert "Traceback" not in error


def test_a_missing_config_is_named(capsys):
    assert main(["train", "no/such.toml"]) == 2
    assert "no/such.toml" in capsys.readouterr().err


def test_evaluation_of_two_scripted_players_is_written_as_json_with_their_comparison(capsys, tmp_path):
    file = tmp_path / "result.json"
    arguments = ["evaluate", QUICKSTART, "--model", "scripted:reference", "--against", "scripted:random"]
    assert main([*arguments, "--seeds", "0:20", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    reference, chance = (result["evaluations"][f"scripted:{name}"] for name in ("reference", "random"))
    # 2 ** 4 > 8, so binary search finds every number within four guesses
    assert (reference["success_rate"], reference["mean_return"]) == (1.0, 1.0)
    assert reference["seeds"] == list(range(20)) == chance["seeds"]
    assert chance["success_rate"] < 1.0
    comparison = result["comparison"]
    assert comparison["num_pairs"] == 20
    assert comparison["mean_difference"] == pytest.approx(1.0 - chance["mean_return"], abs=1e-12)  # two sums' rounding
    assert comparison["num_only_second"] == 20 - round(20 * chance["success_rate"])
    assert "McNemar" in capsys.readouterr().out


def test_the_same_seeds_give_the_same_results_again(tmp_path):
    files = [tmp_path / f"{run}.json" for run in range(2)]
    for file in files:
        main(["evaluate", QUICKSTART, "--model", "tiny:qwen3-64", "--seeds", "5:9", "--json", str(file)])
    first, second = (json.loads(file.read_text())["evaluations"]["tiny:qwen3-64"]["rows"] for file in files)
    assert first == second
    assert [row["seed"] for row in first] == [5, 6, 7, 8]


def test_a_broken_environment_fails_its_check_with_status_1(capsys):
    register("test_commands/Constant-v0", entry_point=Constant)
    try:
        assert main(["env", "check", "test_commands/Constant-v0", "--num-seeds", "3"]) == 1
    finally:
        gymnasium.registry.pop("test_commands/Constant-v0")
    assert "expected an empty answer to earn less than 'reference' on average (1), got 1" in capsys.readouterr().out


def test_a_good_environment_passes_and_takes_options(capsys):
    assert main(["env", "check", "GuessNumber", "--num-seeds", "8", "--option", "high=12"]) == 0
    assert "passed" in capsys.readouterr().out
    assert main(["env", "check", "GuessNumber", "--option", "high"]) == 2
    assert "expected KEY=JSON, got 'high'" in capsys.readouterr().err


def test_the_bundled_environments_are_listed(capsys):
    assert main(["env", "list"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())  # each has a summary
    assert {"gspo_gym/GuessNumber-v0", "gspo_gym/FrozenLake-v0", "gspo_gym/SqlAnalyst-v0"} <= lines.keys()
    assert lines["gspo_gym/SqlAnalyst-v0"] == (
        "A question, a database, and the tools list_tables, describe, query and answer."
    )
    assert "CartPole-v1" not in lines
    assert main(["env", "list", "--all"]) == 0
    assert "\nCartPole-v1 " in capsys.readouterr().out


def test_the_list_says_of_every_suite_with_an_extra_whether_it_is_installed():
    extras = {line.split()[-1] for line in (distribution("gspo-gym").metadata.get_all("Provides-Extra") or [])}
    entries = {entry.extra: entry for entry in map(entry_of, SUITES)}
    assert entries.keys() - {None} == {extra for extra in extras if extra.startswith("envs-")}
    assert entries["envs-openenv"].missing == ()  # websockets and httpx are of the extra `dev`
    requirement = {"envs-gem": "gem-llm", "envs-textarena": "textarena", "envs-verifiers": "verifiers"}
    for extra, package in requirement.items():
        is_there = any(distribution.name == package for distribution in distributions())
        assert entries[extra].missing == (() if is_there else (package,))


def test_what_cannot_be_read_is_listed_without_a_sentence():
    for env_id, place in {"test_list/None-v0": "no_such_module:Env", "test_list/Self-v0": f"{__name__}:NoSuch"}.items():
        register(env_id, place)
        assert entry_of(env_id) == Entry(env_id, "")
        gymnasium.registry.pop(env_id)


def play(arguments, typed, capsys):
    parser = argparse.ArgumentParser()
    env_commands.add_arguments(parser)
    answers = iter(typed)

    def read(_prompt):
        try:
            return next(answers)
        except StopIteration:
            raise EOFError from None

    assert env_commands.play_environment(parser.parse_args(["play", *arguments]), read=read) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", OWN)
def test_every_bundled_environment_can_be_played(name, capsys):
    out = play([name, "--seed", "1", "--max-turns", "2", "--mask"], ["x", "y", "z"], capsys)
    assert "reward" in out
    assert "trained on: " in out
    assert ", return " in out


def test_playing_shows_answers_rewards_and_what_would_be_trained_on(capsys):
    options = ["--option", "low=3", "--option", "high=3", "--option", "style=terse"]
    out = play(["GuessNumber", "--seed", "0", "--mask", *options], ["3"], capsys)
    assert "Guess 3-3. 4 tries." in out
    assert "correct" in out
    assert "terminated, return +1.000" in out
    # the digit and the end-of-turn token are all that the player said
    assert "trained on: 2 of" in out


def test_tools_are_called_like_functions_when_playing(capsys):
    out = play(["SqlAnalyst", "--option", "level=tiny"], ["list_tables()", 'query(sql="SELECT nonsense")'], capsys)
    assert "error" in out
    assert "stopped, return" in out  # end of input, not of the episode


@pytest.mark.parametrize("name", ["overrides", "files"])
@pytest.mark.parametrize(
    "words",
    [["config.toml", "a.b=1", "--flag"], ["config.toml", "--flag", "a.b=1"], ["--flag", "config.toml", "a.b=1"]],
)
def test_a_list_may_stand_before_or_after_an_option(words, name):
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument(name, nargs="*")
    parser.add_argument("--flag", action="store_true")
    seen = []
    parser.set_defaults(run=lambda arguments: seen.append((getattr(arguments, name), arguments.flag)) or 0)
    assert parse_and_run(parser, words) == 0
    assert seen == [(["a.b=1"], True)]


def test_an_option_that_does_not_exist_is_no_override(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["train", "config.toml", "--nonsense"])
    assert caught.value.code == 2
    assert "unrecognized arguments: --nonsense" in capsys.readouterr().err


def parsers(parser):
    """A parser and those of all its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers(command)


def test_no_command_takes_the_beginning_of_an_option_for_the_option():
    found = list(parsers(command_parser()))
    assert len(found) > 20
    for parser in found:
        assert not parser.allow_abbrev, parser.prog
        for option in [option for option in parser._option_string_actions if option.startswith("--")]:
            others = set(parser._option_string_actions)
            if option[:-1] not in others:
                assert parser._get_option_tuples(option[:-1]) == [], f"{parser.prog} {option}"


def test_a_cut_option_moves_no_run_away(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", QUICKSTART, "--set", f"run.folder={tmp_path}"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --set" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_every_parser_of_the_project_is_made_without_abbreviations():
    calls = []
    for path in [
        *(ROOT / "gspo_gym").rglob("*.py"),
        *(ROOT / "envs").rglob("*.py"),
        *(ROOT / "examples").rglob("*.py"),
    ]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ArgumentParser"):
                calls.append((path.name, [ast.unparse(word) for word in node.keywords]))
    assert [name for name, words in calls if "allow_abbrev=False" not in words] == []


def test_a_command_imports_torch_without_looking_for_garbage_and_looks_afterwards():
    program = """
import gc, sys
collections = []
gc.callbacks.append(lambda phase, info: collections.append("torch" in sys.modules))
from gspo_gym.cli.command_line import importing
before = len(collections)
with importing():
    import torch
print(len(collections) - before, gc.isenabled(), gc.get_freeze_count() > 10_000)
frozen = gc.get_freeze_count()
with importing():
    kept = [[]]
print(gc.isenabled(), gc.get_freeze_count() == frozen)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == ["0 True True", "True True"]


@pytest.mark.parametrize("command", ["train", pytest.param("evaluate", marks=pytest.mark.slow)])
def test_the_commands_that_compute_import_so(command, tmp_path):
    """Nothing that imports torch is imported before, and all of it within."""
    # `train` ends at a model that is not there, which `evaluate` says before it computes: it plays an episode.
    base = "/nowhere" if command == "train" else "tiny:qwen3-64"
    program = f"""
import gc, sys
from gspo_gym.cli.main import main
try:
    main([{command!r}, "configs/quickstart.toml", "model.base={base}", "evaluation.seeds=0:1", "run.folder={tmp_path}"])
finally:
    print(gc.get_freeze_count() > 200_000, gc.isenabled())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.stdout.splitlines()[-1:] == ["True True"], ended.stderr
