"""A wheel of this checkout works where the checkout is not."""

import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

USE = """
import gspo_gym, gspo_gym_envs, pathlib, sys
prefix = pathlib.Path(sys.prefix)
for package in (gspo_gym, gspo_gym_envs):
    assert prefix in pathlib.Path(package.__file__).parents, package.__file__
env = gspo_gym.make("GuessNumber")
env.reset(options={"number": 6})
print(env.step("6")[0])
"""


def copy_checkout(folder):
    """Copy the files that git knows, because setuptools writes into the folder that it builds; return their names."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    names = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    return names


@pytest.mark.slow
def test_an_installed_wheel_finds_its_environments_and_commands(tmp_path):
    wheels = tmp_path / "wheels"
    source = tmp_path / "source"
    copy_checkout(source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, source], check=True, cwd=tmp_path
    )
    (wheel,) = wheels.glob("gspo_gym-*.whl")

    home = tmp_path / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    site = next((home / "lib").glob("python*/site-packages"))
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True)
    # The dependencies are those of this environment; its own editable install of the checkout is not followed.
    (site / "dependencies.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("site-packages")))
    python = home / "bin" / "python"
    used = subprocess.run([python, "-c", USE], cwd=tmp_path, capture_output=True, text=True)
    assert used.returncode == 0, used.stderr
    assert used.stdout == "Correct.\n"
    helped = subprocess.run([python, "-m", "gspo_gym.cli", "env", "list"], cwd=tmp_path, capture_output=True, text=True)
    assert "gspo_gym/SqlAnalyst-v0" in helped.stdout, helped.stderr
    named = [python, "-m", "gspo_gym.cli", "config", "check", "quickstart"]
    checked = subprocess.run(named, cwd=tmp_path, capture_output=True, text=True)
    assert checked.stdout.startswith("VALID: quickstart"), checked.stderr
    liked = [python, "-m", "gspo_gym.cli", "config", "new", "mine.toml", "--like", "configs/recipes/paper_gspo.toml"]
    wrote = subprocess.run(liked, cwd=tmp_path, capture_output=True, text=True)
    assert (tmp_path / "mine.toml").is_file(), wrote.stderr
    example = [python, "-m", "gspo_gym_examples.write_environment"]
    assert subprocess.run(example, cwd=tmp_path, capture_output=True).returncode == 0
    judged = [python, "-m", "gspo_gym.cli", "judge", "check", "support_desk/bundle@v1"]
    checked = subprocess.run(judged, cwd=tmp_path, capture_output=True, text=True)
    assert checked.stdout.startswith("VALID: "), checked.stderr
    wrote = subprocess.run(
        [python, "-m", "gspo_gym.cli", "env", "new", "FromWheel"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (tmp_path / "from-wheel-env" / "from_wheel" / "env.py").is_file(), wrote.stderr


@pytest.mark.slow
def test_an_sdist_holds_the_tests_and_setuptools_warns_of_nothing(tmp_path):
    source = tmp_path / "source"
    files = copy_checkout(source)
    build = "from setuptools.build_meta import build_sdist; print(build_sdist('.'))"
    built = subprocess.run([sys.executable, "-W", "error", "-c", build], cwd=source, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "deprecat" not in (built.stdout + built.stderr).lower()
    with tarfile.open(source / built.stdout.split()[-1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert sorted(files - names) == []
