"""A learner's processes as actors of a real Ray on loopback: the same weights, recovery, refusals, and nothing left.

On every change the tests share one Ray, and one more ends with its driver; what loses a Ray of its own is nightly.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from gspo_gym.base.leftovers import MarkedProcesses, descendants, remove_folder, temporary_folder
from gspo_gym.base.ranks import LOOPBACK, Ranks, RanksLostError
from gspo_gym.cli.train import run_training
from gspo_gym.cluster.launcher import Fleet, Program
from gspo_gym.cluster.placement import Part, Resources
from gspo_gym.cluster.ray import RayLauncher, _OwnRay
from gspo_gym.config.build.trainer import build_learner, build_policy
from gspo_gym.config.run_config import RunConfig, load_config
from gspo_gym.errors import PlacementError, ServiceError
from gspo_gym.policy.checkpoints import CheckpointStore
from gspo_gym.run.records import read_events
from tests.cluster.test_learner_ranks import episodes_of, learning
from tests.support.learner_ranks import build_batch_of
from tests.support.saved_steps import require_same
from tests.support.small_quickstart import QUICKSTART, SMALLER

ROOT = Path(__file__).parents[2]
TWO = ["compute.gpu_count=0", "topology.type=cluster", "topology.gpus_for_vllm=1", "topology.gpus_for_training=2"]
ECHO = Program("tests.support.echo_rank")


def configure(folder: Path, *more: str) -> RunConfig:
    return load_config(QUICKSTART, [*SMALLER, *TWO, "rollout.engine=local", f"run.folder={folder}", *more])


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie, which the container's first process removes when it likes."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    return False


def require_gone(pids: set[int], folders: set[Path], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_running(pid)] + [f for f in folders if f.exists()]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.1)
    assert left == []


def folders_of_ray() -> set[Path]:
    return set(Path("/tmp").glob("gspo_ray_*"))


@pytest.fixture(scope="module")
def launcher() -> Iterator[RayLauncher]:
    """A Ray with four cores, which ends with everything that it started."""
    before = folders_of_ray()
    own = dict(os.environ)
    launcher = RayLauncher(None, num_cores=4)
    assert dict(os.environ) == own
    os.environ.update(launcher.variables)  # for what joins it by its address
    pids, folders = descendants(os.getpid()), folders_of_ray() - before
    assert len(folders) == 1
    yield launcher
    pids |= descendants(os.getpid())
    shared = shared_memory_of(pids)
    for name in launcher.variables:
        del os.environ[name]
    launcher.close()
    launcher.close()
    require_gone(pids - _keeper(), folders, 0)
    assert [path for path in shared if path.exists()] == []


def shared_memory_of(pids: set[int]) -> set[Path]:
    """The files in shared memory that these processes have mapped; others' come and go beside them."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "/dev/shm/" in line and not line.endswith(" (deleted)"):
                    found.add(Path(line[line.index("/dev/shm/") :]))
    return found


def _keeper() -> set[int]:
    """The process that ends and removes what is left of this one, which lives as long."""
    return {pid for pid in descendants(os.getpid()) if b"leftovers.py" in Path(f"/proc/{pid}/cmdline").read_bytes()}


def listening_addresses(pids: set[int]) -> set[str]:
    """The addresses, as the kernel writes them, at which these processes take connections."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(file))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                found.add(words[1].partition(":")[0])
    return found


def test_what_is_no_address_of_a_head_is_refused_and_sigterm_is_still_heard() -> None:
    """A program of its own: in this one Ray may have been joined."""
    addresses = ("http://127.0.0.1:8265", "ray://127.0.0.1:1", "local", "head", "head:first")
    code = (
        "import signal, sys\n"
        "from gspo_gym.cluster.ray import RayLauncher\n"
        "from gspo_gym.errors import GymError\n"
        "before = signal.signal(signal.SIGTERM, lambda *_: print('heard'))\n"
        "for address in sys.argv[1:]:\n"
        "    try:\n"
        "        RayLauncher(address)\n"
        "    except GymError as error:\n"
        "        print(error)\n"
        "signal.raise_signal(signal.SIGTERM)\n"
    )
    command = [sys.executable, "-c", code, *addresses]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    expected = [
        f"topology.ray_address (or RAY_ADDRESS): expected HOST:PORT of Ray's head, got '{address}'"
        for address in addresses
    ]
    assert done.stdout.splitlines() == [*expected, "heard"], done.stderr


def test_what_takes_connections_and_says_nothing_is_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gspo_gym.cluster.ray._RAY_SECONDS", 8.0)  # of which Ray's import takes some
    running = descendants(os.getpid())
    with socket.create_server((LOOPBACK, 0)) as mute:
        address = f"{LOOPBACK}:{mute.getsockname()[1]}"
        with pytest.raises(ServiceError, match=rf"^topology\.ray_address: no Ray answers at {address}: nothing came "):
            RayLauncher(address)
    require_gone(descendants(os.getpid()) - running - _keeper(), set(), 0)


def test_ray_listens_on_loopback_only_and_asks_for_a_token(launcher: RayLauncher) -> None:
    found = listening_addresses(descendants(os.getpid()))
    # 127.0.0.1, and the same within IPv6; all of Ray's servers are one of them.
    assert found <= {"0100007F", "0000000000000000FFFF00000100007F"}
    assert found
    code = "import ray, sys; ray.init(address=sys.argv[1], logging_level='ERROR')"
    environment = {**os.environ, "RAY_AUTH_TOKEN": "0" * 64}
    stranger = subprocess.run(
        [sys.executable, "-c", code, launcher.address], env=environment, capture_output=True, text=True, timeout=120
    )
    assert stranger.returncode != 0
    assert "uthentic" in stranger.stderr


def test_a_killed_actor_ends_the_others_is_named_and_its_place_is_free_again(launcher: RayLauncher) -> None:
    fleet = Fleet(launcher, [Part("learner", 2, Resources(cores=1))])
    for _ in range(2):
        ranks = Ranks(fleet.starts("learner", ECHO), host=launcher.host)
        ranks.send({"do": "echo"}, [b"abc"], num_bodies=1)
        assert [(head["rank"], list(bodies)) for head, bodies in (ranks.receive(0), ranks.receive(1))] == [
            (0, [b"abcabc"]),
            (1, [b"abcabc"]),
        ]
        killed, other = ranks.handles[1].pid, ranks.handles[0].pid  # type: ignore[attr-defined]  # of actors
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(RanksLostError, match=rf"rank 1.*process {killed} on 127\.0\.0\.1|rank 1 has closed"):
            ranks.receive(0)
        ranks.close()
        require_gone({killed, other}, set())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["topology.gpus_for_training=5"], "5 cores are needed in all and 4 cores free: 1 core missing.* on 127.0.0.1"),
        (["compute.nodes=2"], r"^compute\.nodes = 2: 1 there: 127\.0\.0\.1$"),
    ],
)
def test_a_demand_that_cannot_be_met_is_a_sentence_at_once(
    overrides: list[str], message: str, launcher: RayLauncher, tmp_path: Path
) -> None:
    config = configure(tmp_path, f"topology.ray_address={launcher.address}", *overrides)
    deadline = time.monotonic() + 30
    while sum(offer.cores for offer in launcher.offers()) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)  # Ray learns a little later that the actors of another test have gone
    began = time.monotonic()
    with pytest.raises(PlacementError, match=message):
        run_training(config)
    assert time.monotonic() - began < 60  # and not after the 120 that an actor is waited for
    assert not (tmp_path / "quickstart").exists()


def test_two_actors_learn_and_two_sample_what_one_process_does(launcher: RayLauncher, tmp_path: Path) -> None:
    """And so what two local processes do: see test_learner_ranks.py."""
    steps = ["training.iterations_per_epoch=3", "training.checkpoint_every_n_iters=3", "evaluation.seeds=0:20"]
    kinds = {
        "ray": [f"topology.ray_address={launcher.address}", "topology.gpus_for_vllm=2"],
        "one": ["topology.gpus_for_training=1"],
    }
    summaries = {}
    for name, more in kinds.items():
        config = configure(tmp_path, *steps, f"model.label={name}", *more)
        summaries[name] = run_training(config)
    saved = {name: tmp_path / name / "checkpoints/step_000003" for name in kinds}
    assert summaries["ray"]["gradient_steps"] == 3
    assert (summaries["ray"]["curve"], summaries["ray"]["trained_tokens"]) == (
        summaries["one"]["curve"],
        summaries["one"]["trained_tokens"],
    )
    assert len(episodes_of(tmp_path / "ray")) == 3 * 64 + 2 * 20
    # In the order in which they ended, which is another one on two replicas.
    assert sorted(episodes_of(tmp_path / "ray")) == sorted(episodes_of(tmp_path / "one"))
    require_same(saved["ray"], saved["one"])
    assert not any(event["kind"] == "ranks_lost" for event in read_events(tmp_path / "ray"))


@pytest.mark.nightly
def test_killed_actors_learn_their_batches_again(launcher: RayLauncher, tmp_path: Path) -> None:
    config = configure(tmp_path, f"topology.ray_address={launcher.address}")
    alone, policy = build_policy(config), build_policy(config)
    expected, told = build_learner(config, alone), list[str]()
    store = CheckpointStore(config.run_folder / "checkpoints")
    with learning(config, policy, told) as learner:
        store.save(0, policy=policy, learner=learner, trainer_state={})
        learner.update(build_batch_of(0))
        killed = _actors()[1]
        os.kill(killed, signal.SIGKILL)
        learner.update(build_batch_of(1))  # the first is learned again before
        store.save(2, policy=policy, learner=learner, trainer_state={})
    for number in range(2):
        expected.update(build_batch_of(number))
    store.save(4, policy=alone, learner=expected, trainer_state={})
    folder = config.run_folder / "checkpoints"
    require_same(folder / "step_000002", folder / "step_000004")
    assert len(told) == 1
    assert str(killed) in told[0] or "closed its connection" in told[0]


def _actors() -> list[int]:
    """The processes that are actors of ours."""
    found = []
    for pid in sorted(descendants(os.getpid())):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::Process"):
                found.append(pid)
    return found


def _ray_process(name: str) -> int:
    """The number of the newest of Ray's own processes of that name."""
    begun: dict[int, int] = {}  # by their start: numbers begin anew after 32,768 processes and threads
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].endswith(b"/" + name.encode()):
                begun[int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])] = pid
    assert begun, f"no {name} runs"
    return begun[max(begun)]


@pytest.mark.nightly
def test_a_ray_of_our_own_that_dies_or_hangs_is_noticed_and_started_again() -> None:
    others = descendants(os.getpid())  # of the Ray of the other tests
    launcher = RayLauncher(None, num_cores=1, silence_seconds=5)
    fleet = Fleet(launcher, [Part("learner", 1, Resources(cores=1))])
    for name, number in (("raylet", signal.SIGKILL), ("gcs_server", signal.SIGSTOP)):
        ranks = Ranks(fleet.starts("learner", ECHO), host=launcher.host)
        running, folders = descendants(os.getpid()) - others, folders_of_ray()
        os.kill(_ray_process(name), number)
        began = time.monotonic()
        with pytest.raises(
            RanksLostError, match=r"process \d+ on 127.0.0.1\) is lost with Ray: |closed its connection"
        ):
            ranks.receive(0)
        assert time.monotonic() - began < 60  # 1 and 6 seconds on a machine that is idle
        ranks.close()
        assert fleet.starts("learner", ECHO)
        require_gone(running - _keeper(), set())
        assert len(folders_of_ray()) == len(folders)
    running = descendants(os.getpid()) - others
    launcher.close()
    require_gone(running - _keeper(), set(), 0)


@pytest.mark.nightly
def test_a_batch_is_learned_again_when_ray_itself_is_lost(tmp_path: Path) -> None:
    config = configure(tmp_path, "topology.launcher=ray", "topology.heartbeat_seconds=5")
    alone, policy = build_policy(config), build_policy(config)
    expected, told = build_learner(config, alone), list[str]()
    store = CheckpointStore(config.run_folder / "checkpoints")
    with learning(config, policy, told) as learner:
        store.save(0, policy=policy, learner=learner, trainer_state={})
        learner.update(build_batch_of(0))
        os.kill(_ray_process("raylet"), signal.SIGSTOP)
        os.kill(_actors()[0], signal.SIGKILL)
        learner.update(build_batch_of(1))
        store.save(2, policy=policy, learner=learner, trainer_state={})
    for number in range(2):
        expected.update(build_batch_of(number))
    store.save(4, policy=alone, learner=expected, trainer_state={})
    folder = config.run_folder / "checkpoints"
    require_same(folder / "step_000002", folder / "step_000004")
    assert 1 <= len(told) <= 3


@pytest.mark.nightly
def test_a_run_ends_with_a_sentence_when_the_ray_that_it_joined_is_lost_and_goes_on_with_another(
    tmp_path: Path,
) -> None:
    few = ["warmup.num_episodes=32", "rollout.episodes_per_batch=32", "evaluation.seeds=0:8"]
    words = [
        *SMALLER,
        *TWO,
        *few,
        "training.checkpoint_every_n_iters=1",
        "rollout.engine=local",
        f"run.folder={tmp_path}",
    ]
    command = [sys.executable, "-m", "gspo_gym.cli", "train", str(QUICKSTART), *words, "topology.heartbeat_seconds=5"]
    for steps, is_killed in ((2000, True), (3, False)):
        home = temporary_folder("gspo_ray_")  # of a short name: Ray has sockets in it
        ray = _OwnRay(home, 2)
        options = [f"topology.ray_address={ray.address}", f"training.iterations_per_epoch={steps}", "--resume=auto"]
        run = subprocess.Popen(
            [*command, *options], stderr=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **ray.variables}
        )
        assert run.stderr is not None
        try:
            if is_killed:
                metrics = tmp_path / "quickstart/metrics.jsonl"
                while run.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b"\n")):
                    time.sleep(0.1)
                os.kill(_ray_process("raylet"), signal.SIGKILL)
            began = time.monotonic()
            said = run.communicate(timeout=120)[1]
        finally:
            run.kill()
            ray.close()
            remove_folder(home)
        if is_killed:
            assert run.returncode not in (0, None)
            assert time.monotonic() - began < 60
            assert f"Ray at {ray.address} is lost: " in said
            assert said.rstrip().endswith("Start Ray again, and go on with --resume")
            assert json.loads((tmp_path / "quickstart/summary.json").read_text())["status"] == "failed"
        else:
            assert run.returncode == 0, said


TWO_NODES = """
import sys
from ray.cluster_utils import Cluster
least = {"object_store_memory": 80 * 2**20, "node_ip_address": "127.0.0.1"}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **least})
other = cluster.add_node(num_cpus=1, **least)
print(cluster.address, flush=True)
sys.stdin.readline()
cluster.remove_node(other, allow_graceful=False)
sys.stdin.read()
"""


@pytest.mark.nightly
def test_only_what_was_on_a_node_that_leaves_is_moved_and_where_there_is_no_room_is_said_at_once() -> None:
    home, processes_of_ray = temporary_folder("gspo_ray_"), MarkedProcesses()
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "1" * 64,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": home,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # loopback
    }
    with contextlib.ExitStack() as stack:
        stack.callback(remove_folder, home)
        stack.callback(processes_of_ray.end, grace_seconds=0.0)
        cluster = subprocess.Popen(
            [sys.executable, "-c", TWO_NODES],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables, **processes_of_ray.environment},
        )
        assert cluster.stdin is not None
        assert cluster.stdout is not None
        stack.enter_context(cluster)
        stack.callback(cluster.kill)
        address = cluster.stdout.readline().strip()
        with patched_environment(variables):
            launcher = stack.enter_context(contextlib.closing(RayLauncher(address)))
        fleet = Fleet(launcher, [Part("replica", 3, Resources(cores=1))])
        replicas = []
        for start in fleet.starts("replica", ECHO):
            replicas.append(Ranks([start], host=launcher.host))
            stack.callback(replicas[-1].close)
        nodes = [each.handles[0].name.rpartition(" on ")[2] for each in replicas]
        assert nodes[0] == nodes[1] != nodes[2]
        cluster.stdin.write("\n")
        cluster.stdin.flush()
        with pytest.raises(RanksLostError):
            replicas[2].receive(0)
        while len(launcher.offers()) > 1:  # Ray learns it a moment later
            time.sleep(0.1)
        began = time.monotonic()
        with pytest.raises(
            PlacementError, match=rf"1 core are needed in all and 0 cores free.* on {re.escape(nodes[0])}$"
        ):
            fleet.start("replica", 2, ECHO)
        assert time.monotonic() - began < 60  # and not after the 120 that an actor is waited for
        for each in replicas[:2]:  # the others play on, and one that is lost begins where it was
            each.send({"do": "echo"})
            assert each.receive(0)[0]["do"] == "echo"
        replicas[1].close()
        replicas.append(Ranks([fleet.start("replica", 1, ECHO)], host=launcher.host))
        stack.callback(replicas[-1].close)
        assert replicas[-1].handles[0].name.endswith(f" on {nodes[0]}")


@contextlib.contextmanager
def patched_environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_nothing_outlives_a_driver_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import json, os, signal\n"
        "from tests.cluster.test_ray import *\n"
        "launcher = RayLauncher(None, num_cores=2)\n"
        "fleet = Fleet(launcher, [Part('learner', 2, Resources(cores=1))])\n"
        "ranks = Ranks(fleet.starts('learner', ECHO), host=launcher.host)\n"
        "print(json.dumps(sorted(descendants(os.getpid()))), flush=True)\n"
        "signal.pause()\n"
    )
    before = folders_of_ray()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    driver = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )
    assert driver.stdout is not None
    pids = set[int](json.loads(driver.stdout.readline()))
    folders = folders_of_ray() - before
    assert len(pids) >= 6  # Ray's own, two actors, and what ends them
    driver.kill()
    driver.wait()
    driver.stdout.close()
    require_gone(pids, folders, 60)
