"""A wheel of this checkout works where the checkout is not."""

import subprocess
import sys
import sysconfig
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


@pytest.mark.slow
def test_an_installed_wheel_finds_its_environments_and_commands(tmp_path):
    wheels = tmp_path / "wheels"
    source = tmp_path / "source"
    # A copy, because setuptools writes build/ into the folder it builds.
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split(
        "\n"
    )
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
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
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    python = home / "bin" / "python"
    used = subprocess.run([python, "-c", USE], cwd=tmp_path, capture_output=True, text=True)
    assert used.returncode == 0, used.stderr
    assert used.stdout == "Correct.\n"
    helped = subprocess.run([python, "-m", "gspo_gym.cli", "env", "list"], cwd=tmp_path, capture_output=True, text=True)
    assert "gspo_gym/SqlAnalyst-v0" in helped.stdout, helped.stderr
    named = [python, "-m", "gspo_gym.cli", "config", "check", "quickstart"]
    checked = subprocess.run(named, cwd=tmp_path, capture_output=True, text=True)
    assert checked.stdout.startswith("VALID: quickstart"), checked.stderr
    judged = [python, "-m", "gspo_gym.cli", "judge", "check", "support_desk/bundle@v1"]
    checked = subprocess.run(judged, cwd=tmp_path, capture_output=True, text=True)
    assert checked.stdout.startswith("VALID: "), checked.stderr
    wrote = subprocess.run(
        [python, "-m", "gspo_gym.cli", "env", "new", "FromWheel"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (tmp_path / "from-wheel-env" / "from_wheel" / "env.py").is_file(), wrote.stderr
