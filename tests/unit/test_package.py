"""What pyproject.toml and setup.py make of the checkout: names, links, and what an installation holds."""

import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import setuptools
import yaml
from markdown_it import MarkdownIt

from gspo_gym.base.files import packaged_file
from gspo_gym.cli.main import _LEARNER_PACKAGES, main

ROOT = Path(__file__).parents[2]
FOR_AUTHORS = ROOT / "docs" / "tutorials" / "first_environment.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ADDRESS = PROJECT["urls"]["Repository"]


@pytest.fixture
def arguments(monkeypatch):
    """The arguments with which setup.py calls setuptools."""
    calls = []
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: calls.append(arguments))
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(ROOT / "setup.py"))
    (only,) = calls
    return only


def targets(text):
    """Return the targets of the links and images of rendered Markdown, as (kind, target)."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    inline = [child for token in tokens for child in token.children or ()]
    return [
        (child.type, child.attrs["href" if child.type == "link_open" else "src"])
        for child in inline
        if child.type in ("link_open", "image")
    ]


def test_every_link_of_the_long_description_leads_to_a_file_of_the_repository(arguments):
    assert arguments["long_description_content_type"] == "text/markdown"
    rendered = targets(arguments["long_description"])
    assert len(rendered) == len(targets((ROOT / "README.md").read_text())) > 20
    assert {kind for kind, _ in rendered} == {"link_open", "image"}
    for kind, target in rendered:
        assert target.startswith("https://"), target
        if target.startswith(ADDRESS):
            form, tag, path = target.removeprefix(f"{ADDRESS}/").split("/", 2)
            assert (form, tag) == ("raw" if kind == "image" else "blob", f"v{PROJECT['version']}")
            assert (ROOT / path.partition("#")[0]).exists(), target


def test_the_address_of_the_repository_stands_in_one_place():
    done = subprocess.run(["git", "grep", "-lF", ADDRESS], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["pyproject.toml"]


def test_a_citation_names_the_version_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])


def test_the_public_ci_tests_the_versions_of_python_that_the_package_names():
    jobs = {path.stem: yaml.safe_load(path.read_text())["jobs"] for path in (ROOT / ".github/workflows").glob("*.yml")}
    versions = jobs["test"]["test"]["strategy"]["matrix"]["python"]
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    assert versions == named
    assert PROJECT["requires-python"] == f">={versions[0]}"
    steps = [step.get("run", "") for parts in jobs.values() for job in parts.values() for step in job["steps"]]
    targets = (
        re.findall(r"^make (\w+)$", "\n".join(steps), re.MULTILINE)
        + jobs["nightly"]["more"]["strategy"]["matrix"]["target"]
    )
    assert set(targets) == {"test", "more", "nightly"}
    assert all(f"\n{target}: " in (ROOT / "Makefile").read_text() for target in targets)
    paths = re.findall(r"\b(?:tests|configs)/[\w/]+\.\w+", "\n".join(steps))
    assert len(paths) == 5
    assert all((ROOT / path).exists() for path in paths)
    (install,) = re.findall(r"pip install gymnasium .*", "\n".join(steps))
    assert f"\n{install}\n" in FOR_AUTHORS.read_text()


@pytest.mark.parametrize("page", ["SECURITY.md", "RELEASING.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md"])
def test_the_links_of_a_page_beside_readme_lead_somewhere(page):
    links = [target for _, target in targets((ROOT / page).read_text()) if "://" not in target]
    assert [target for target in links if not (ROOT / target).exists()] == []


def test_what_is_promised_of_security_names_its_tests():
    rows = re.findall(r"^\| (.*?) \| (.*?) \| (.*?) ?\|$", (ROOT / "SECURITY.md").read_text(), re.MULTILINE)[1:]
    untested = [part for part, _, tests in rows if not tests]
    assert len(rows) >= 6
    assert untested == ["worker processes of environments"]  # of which nothing is promised
    assert [tests for *_, tests in rows if tests and not (ROOT / tests.strip("`")).is_file()] == []


def test_every_folder_with_files_of_the_package_is_a_package(arguments):
    """setuptools is to drop files of folders that are none."""
    packages = set(arguments["packages"])
    assert {"gspo_gym.cli.templates.text", "gspo_gym_configs.rubrics", "gspo_gym_envs.code_repair.library"} <= packages
    assert {"gspo_gym_examples.data", "gspo_gym_configs.recipes"} <= packages
    assert not any("__pycache__" in name for name in packages)


@pytest.mark.parametrize("kind", ["configs", "examples"])
def test_readme_names_files_that_an_installation_holds(kind, tmp_path, monkeypatch):
    text = (ROOT / "README.md").read_text()
    names = set(re.findall(rf"\b{kind}/[\w./]+\.(?:toml|py|md)\b", text))
    assert names
    monkeypatch.chdir(tmp_path)
    for name in names - {"examples/figures/credit_comparison.md"}:
        assert packaged_file(Path(name)).read_bytes() == (ROOT / name).read_bytes(), name


def test_a_file_of_the_package_is_not_taken_for_one_that_is_here_or_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("configs/none.toml", "quickstart.toml", "configs/../configs/quickstart.toml", "/configs/wordle.toml"):
        assert packaged_file(Path(name)) == Path(name)
    Path("configs").mkdir()
    Path("configs/quickstart.toml").write_text("")
    assert packaged_file(Path("configs/quickstart.toml")) == Path("configs/quickstart.toml")


def test_a_configuration_with_files_of_the_package_is_valid_in_an_empty_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["config", "check", "smollm2_dataset", "--elsewhere"]) == 0
    assert main(["env", "check", "Dataset", "--num-seeds=2", "--option=rows=examples/data/larger.jsonl"]) == 0
    assert list(tmp_path.iterdir()) == []
    assert main(["config", "check", "configs/no_such.toml"]) == 2
    assert "configs/no_such.toml: there is no such file" in capsys.readouterr().err


WITHOUT_LEARNER = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name.partition(".")[0])

sys.meta_path.insert(0, Refused())
import gspo_gym, gspo_gym.env, gspo_gym.types
from gspo_gym import DatasetEnv, RewardTerms, TaskSource, TextEnv, ToolEnv, as_gymnasium, check_env, make_vec, tool
from gspo_gym.cli.main import main

assert check_env("GuessNumber", seeds=range(2), num_leak_episodes=0).passed
commands = ("env list", "env new WordSort", "env card GuessNumber", "train quickstart")
statuses = [main(words.split()) for words in commands]
assert statuses == [0, 0, 0, 2], statuses
"""


def test_an_author_of_environments_needs_what_readme_installs_without_torch(tmp_path):
    """In a process of its own, in which the rest cannot be imported."""
    first, _, learner = (ROOT / "pyproject.toml").read_text().partition("# For a learner.\n")
    dependency = re.compile(r'^    "([\w-]+)[>=]', re.MULTILINE)
    for_authors = dependency.findall(first.partition("\ndependencies = [")[2])
    for_learners = dependency.findall(learner.partition("\n]\n")[0])
    assert set(_LEARNER_PACKAGES) == set(for_learners)
    assert f"pip install {' '.join(for_authors)}\n" in FOR_AUTHORS.read_text()
    code = WITHOUT_LEARNER.format(names={*for_learners, "accelerate", "huggingface_hub"})
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "MissingExtraError: train needs torch: pip install gspo-gym\n"


def test_the_changelog_is_short_until_there_is_a_release():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert f"## {PROJECT['version']}" in text
    assert PROJECT["version"] != "0.1.0" or len(text.splitlines()) <= 40
