"""The templates of `examples/cluster`: their commands train, and their keys are those of the systems."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from gspo_gym.config.run_config import load_config
from gspo_gym.config.services import refuse_to_train
from tests.support.small_quickstart import QUICKSTART

ROOT = Path(__file__).parents[3]
TEMPLATES = ROOT / "examples/cluster"


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
