"""`gspo-gym config new --like` and `--short`."""

import tomllib
from pathlib import Path

import pytest

from gspo_gym.cli.main import main
from gspo_gym.config.build.first_run import first_run
from gspo_gym.config.reference import new_config, short_config

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize("extra", [[], ["--short"]], ids=["whole", "short"])
@pytest.mark.parametrize("name", ["quickstart", "smollm2_guess", "dataset"])
def test_a_file_like_another_differs_in_its_label_alone(name, extra, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["config", "new", "mine.toml", "--like", name, *extra]) == 0
    text, original = Path("mine.toml").read_text(), (CONFIGS / f"{name}.toml").read_text()
    expected = tomllib.loads(original)
    expected["model"]["label"] = "mine"
    assert tomllib.loads(text) == expected
    has_comments = any(line.startswith("#") for line in text.splitlines())
    assert has_comments == (extra == [])


def test_a_short_file_sets_what_the_long_one_sets_and_has_no_comments(capsys):
    settings = first_run("GuessNumber", model="tiny:qwen3-64-v2", label="my-run", options={})
    assert main(["config", "new", "--short"]) == 0
    text = capsys.readouterr().out
    assert "#" not in text
    assert len(text.splitlines()) < 60
    assert tomllib.loads(text) == tomllib.loads(new_config(settings.sections))
    assert short_config(settings.sections, ["why"]).startswith("# Note: why.\n\n[run]\n")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--like", "quickstart", "--env", "Wordle"], "leave --env, --model and --option away"),
        (["--like", "quickstrat"], "did you mean 'quickstart'?"),
        (["--like", "configs/rubrics/sql_analyst.yaml"], "expected a file that ends in .toml"),
    ],
)
def test_what_cannot_be_copied_is_a_sentence(words, sentence, capsys):
    assert main(["config", "new", *words]) == 2
    assert sentence in capsys.readouterr().err
