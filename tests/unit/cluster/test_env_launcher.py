"""Runs that torchrun and srun have started: the weights of local processes, one reason for an end, and going on."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from gspo_gym.base.leftovers import descendants
from gspo_gym.config.run_config import load_config
from gspo_gym.config.services import refuse_to_train
from gspo_gym.learning.saved import SavedTensors
from gspo_gym.run.records import read_events
from tests.support.small_quickstart import QUICKSTART, SMALLER

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
TEMPLATES = ROOT / "examples/cluster"
STEPS = ["training.iterations_per_epoch=4", "training.checkpoint_every_n_iters=1", "evaluation.seeds=0:20"]
TWO = ["compute.gpu_count=0", "topology.type=cluster", "topology.gpus_for_vllm=1", "topology.gpus_for_training=2"]
MAX_SECONDS = 500  # of a run, on a busy machine


def overrides(folder: Path, label: str) -> list[str]:
    few = ["warmup.num_episodes=64", "rollout.episodes_per_batch=32"]
    return [*SMALLER, *TWO, *STEPS, *few, "rollout.engine=local", f"run.folder={folder}", f"model.label={label}"]


def environment(**more: str) -> dict[str, str]:
    """No variables of a launcher that has started these tests, and the same threads everywhere."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RAY_"))}
    return {**ours, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def run(command: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=environment(**more), capture_output=True, text=True, timeout=MAX_SECONDS
    )


def weights(run_folder: Path, step: int) -> dict[str, bytes]:
    """The weights, the optimizer and what else the learner goes on from, bit for bit."""
    folder = run_folder / f"checkpoints/step_{step:06d}"
    saved = {**load_file(folder / "model.safetensors"), **SavedTensors.of_learner(folder / "resume")}
    return {name: tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in saved.items()}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose two processes this machine has started."""
    folder = tmp_path_factory.mktemp("local")
    done = run([sys.executable, "-m", "gspo_gym.cli", "train", str(QUICKSTART), *overrides(folder, "local")])
    assert done.returncode == 0, done.stderr
    return folder / "local"


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def test_another_number_of_processes_than_the_learners_names_both(tmp_path: Path) -> None:
    words = [*overrides(tmp_path, "run"), "topology.gpus_for_training=3"]
    done = run([*TORCHRUN, "-m", "gspo_gym.cli", "train", str(QUICKSTART), *words])
    assert done.returncode != 0
    assert "WORLD_SIZE = 2, but topology.gpus_for_training = 3" in done.stderr
    assert not (tmp_path / "run").exists()


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    return False


@contextlib.contextmanager
def started(command: list[str], output: Path, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    with output.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment(**more), stdout=file, stderr=file)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def kill_rank_one_after(run_folder: Path, step: int, process: subprocess.Popen[bytes]) -> tuple[int, set[int]]:
    """Kill the process that is rank 1, once there is a checkpoint; return it and all processes of then."""
    deadline = time.monotonic() + MAX_SECONDS
    while not (run_folder / f"checkpoints/step_{step:06d}/manifest.json").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running = descendants(process.pid)
    (rank,) = [pid for pid in running if _variable(pid, "RANK") == "1" or _variable(pid, "SLURM_PROCID") == "1"]
    os.kill(rank, signal.SIGKILL)
    return rank, running


def _variable(pid: int, name: str) -> str | None:
    """What a process was started with."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if line.startswith(f"{name}=".encode()):
                return line.decode().partition("=")[2]
    return None


def require_gone(pids: set[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


@pytest.mark.nightly
def test_torchrun_starts_all_again_after_a_death_and_the_weights_are_those_of_two_local_processes(
    local: Path, tmp_path: Path
) -> None:
    words = ["-m", "gspo_gym.cli", "train", str(QUICKSTART), *overrides(tmp_path, "run")]
    with started([*TORCHRUN, "--max-restarts", "2", *words], tmp_path / "output") as process:
        _, running = kill_rank_one_after(tmp_path / "run", 1, process)
        assert process.wait(MAX_SECONDS) == 0, (tmp_path / "output").read_text()[-3000:]
    require_gone(running, 30)
    assert weights(tmp_path / "run", 4) == weights(local, 4)
    assert any(event["kind"] == "resumed" for event in read_events(tmp_path / "run"))


SRUN = """\
#!/usr/bin/env bash
# What `srun` does for this test: as many tasks as the job has, with its variables, on one machine.
[ "$1" = --kill-on-bad-exit=1 ] && shift
export SLURM_STEP_ID=0 SLURM_NTASKS=$((SLURM_JOB_NUM_NODES * SLURM_NTASKS_PER_NODE))
pids=()
for ((task = 0; task < SLURM_NTASKS; task++)); do
  SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
  pids+=($!)
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit "$status"
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The variables of a job of a node with two tasks, and `srun`, `scontrol` and `gspo-gym` to be found."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    commands = {
        "srun": SRUN,
        "scontrol": '#!/usr/bin/env bash\n[ "$*" = "show hostnames node1" ] && echo 127.0.0.1\n',
        "gspo-gym": f'#!/usr/bin/env bash\nexec {shlex.quote(sys.executable)} -m gspo_gym.cli "$@"\n',
    }
    for name, text in commands.items():
        (binaries / name).write_text(text)
        (binaries / name).chmod(0o755)
    return {
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_PROCID": "0",  # of the script itself
        "SLURM_NTASKS": "2",
    }


@pytest.mark.nightly
def test_the_template_for_slurm_trains_ends_as_one_and_goes_on(
    local: Path, slurm: dict[str, str], tmp_path: Path
) -> None:
    script = ["bash", str(TEMPLATES / "slurm.sbatch"), str(QUICKSTART)]
    theirs = {word.partition("=")[0] for word in _command_of(script[1])[1]}
    words = [word for word in overrides(tmp_path, "run") if word.partition("=")[0] not in theirs]
    with started([*script, *words], tmp_path / "output", **slurm) as process:
        rank, running = kill_rank_one_after(tmp_path / "run", 1, process)
        killed = time.monotonic()
        assert process.wait(MAX_SECONDS) != 0
        assert time.monotonic() - killed < 120  # the others have 5 seconds to say so; a busy machine takes longer
    require_gone(running, 30)
    assert rank in running
    said = (tmp_path / "output").read_text()
    assert "the learner's ranks were lost: rank " in said, said[-3000:]
    done = run([*script, *words], **slurm, SLURM_RESTART_COUNT="1")
    assert done.returncode == 0, done.stderr
    assert weights(tmp_path / "run", 4) == weights(local, 4)


def _command_of(script: str) -> tuple[list[str], list[str]]:
    """The words of the line of a script that trains: its options, and its settings with numbers for variables."""
    text = Path(script).read_text().replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if "gspo-gym train" in line and not line.startswith("#")]
    line = re.sub(r"\$\(\([^)]*\)\)|\$SLURM_\w+", "2", line).replace('"$@"', "").replace('"$config"', "CONFIG")
    words = shlex.split(line[line.index("gspo-gym") :])
    return [word for word in words if word.startswith("-")], [word for word in words[3:] if not word.startswith("-")]


@pytest.mark.parametrize("name", ["slurm.sbatch", "ray_job.sh", "kuberay.yaml"])
def test_a_templates_command_is_one_that_trains(name: str, tmp_path: Path) -> None:
    if name == "kuberay.yaml":
        words = shlex.split(yaml.safe_load((TEMPLATES / name).read_text())["spec"]["entrypoint"])
        assert words[:2] == ["gspo-gym", "train"]
        assert (ROOT / words[2]).is_file()
        options, settings = words[3:4], words[4:]
    else:
        subprocess.run(["bash", "-n", str(TEMPLATES / name)], check=True)
        options, settings = _command_of(str(TEMPLATES / name))
    assert options == ["--resume=auto"]
    config = load_config(QUICKSTART, settings)
    refuse_to_train(config.sections)
    assert config.topology is not None
    assert config.topology.gpus_for_training == 2
    assert config.compute is not None
    assert config.compute.nodes == 2
    if name != "slurm.sbatch":  # which is submitted from where the runs' folder is
        assert any(word.startswith("run.folder=") for word in settings)


def test_the_template_for_kuberay_has_only_keys_of_its_resources() -> None:
    """Those of KubeRay's samples `ray-job.*.yaml` and `ray-cluster.auth.secret-ref.yaml`, and of a pod."""
    job = yaml.safe_load((TEMPLATES / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job["spec"].keys() <= {"entrypoint", "shutdownAfterJobFinishes", "backoffLimit", "rayClusterSpec"}
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster.keys() == {"authOptions", "rayVersion", "headGroupSpec", "workerGroupSpecs"}
    (workers,) = cluster["workerGroupSpecs"]
    assert workers.keys() == {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
    assert cluster["headGroupSpec"].keys() == {"rayStartParams", "template"}
    nodes = 1 + workers["replicas"]
    assert f"compute.nodes={nodes}" in job["spec"]["entrypoint"]
    assert f"ray=={cluster['rayVersion']}\n" in (ROOT / "constraints.txt").read_text()
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container.keys() == {"name", "image", "resources", "volumeMounts"}
        assert [mount["name"] for mount in container["volumeMounts"]] == [volume["name"] for volume in pod["volumes"]]
