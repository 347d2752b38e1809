"""A program that starts every kind of process and folder that the package starts, and then waits to be killed.

`python parent_of_all.py FOLDER KIND...` prints a line "KIND PIDS..." for each when it runs; PIDS are those known here.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gspo_gym.env.core import TextEnv

SLEEP = [sys.executable, "-c", "import signal; signal.pause()"]


class Parent(TextEnv):
    """Starts a process in another session, and waits."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        child = subprocess.Popen(SLEEP, start_new_session=True, stdout=subprocess.DEVNULL)
        return f"{os.getpid()} {child.pid}", {}


def worker(_: Path) -> str:
    from gspo_gym.env.workers.env import ProcessEnv

    env = ProcessEnv("parent_of_all:Parent")
    _KEPT.append(env)
    messages, _info = asyncio.run(env.reset(seed=0))
    return str(messages[0].content)


def sandbox(_: Path) -> str:
    from gspo_gym_envs.code_repair.sandbox.run import SandboxLimits, run_python

    arguments = {"limits": SandboxLimits(max_seconds=600.0)}
    threading.Thread(target=run_python, args=("import time; time.sleep(600)",), kwargs=arguments, daemon=True).start()
    while not (running := [pid for pid in descendants() if _is_sandboxed(pid)]):
        time.sleep(0.01)
    return " ".join(map(str, running))


def _is_sandboxed(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().endswith(b"main.py\0")
    except OSError:
        return False


def wrapped(_: Path) -> str:
    """A sandbox of another program, which needs a folder."""
    from gspo_gym_envs.code_repair.sandbox.run import SandboxLimits, run_python

    arguments = {"wrapper": ["env", "FOLDER={folder}"], "limits": SandboxLimits(max_seconds=600.0)}
    code = "import os, time; print(os.getppid(), file=open('../ready', 'w')); time.sleep(600)"
    threading.Thread(target=run_python, args=(code,), kwargs=arguments, daemon=True).start()
    ready = Path(os.environ["TMPDIR"]) / "ready"
    while not ready.exists():
        time.sleep(0.01)
    ready.unlink()
    return ""


def watchdog(folder: Path) -> str:
    from gspo_gym.env.watchdog import watching

    before = descendants()
    watch = watching(folder / "marker", 600.0, advice="")
    watch.__enter__()
    _KEPT.append(watch)
    return " ".join(map(str, descendants() - before))


def trial(folder: Path) -> str:
    from gspo_gym.cli.search.command import run_trial

    before = descendants()

    def run() -> None:
        search = run_trial(
            [],
            run_folder=folder / "trial",
            log=folder / "trial.log",
            metric="final_mean_return",  # type: ignore[arg-type]
            timeout_seconds=None,
            should_stop=lambda _: False,
            num_parallel=1,
            poll_seconds=600.0,
            command=SLEEP,
        )
        asyncio.run(search)

    threading.Thread(target=run, daemon=True).start()
    while not (new := descendants() - before):
        time.sleep(0.01)
    return " ".join(map(str, new))


def starting(_: Path) -> str:
    """A process of a library that has not named it yet."""
    from gspo_gym.base.leftovers import all_end_with_us

    block = all_end_with_us()
    block.__enter__()
    _KEPT.append(block)
    child = subprocess.Popen(SLEEP, start_new_session=True, stdout=subprocess.DEVNULL)
    time.sleep(1)  # ten times what it may take to be seen
    return str(child.pid)


def temporary(_: Path) -> str:
    from gspo_gym.base.leftovers import temporary_folder

    return _filled(temporary_folder("gspo_gym-start-"))


def staged(folder: Path) -> str:
    from gspo_gym.policy.staging import staging_root

    _filled(staging_root(folder / "a", in_memory=True, num_bytes=1))
    return _filled(staging_root(folder / "b", in_memory=False, num_bytes=1))


def exported(folder: Path) -> str:
    """A model that is being exported, stopped where its card is written."""
    from gspo_gym.policy.export import export

    has_begun, target = threading.Event(), folder / "exported" / "model"

    def describe(_: object) -> str:
        has_begun.set()
        time.sleep(600)
        return ""

    model: dict[str, Any] = {"target": target, "describe": describe}
    threading.Thread(target=export, args=("tiny:qwen3-64",), kwargs=model, daemon=True).start()
    has_begun.wait()
    (draft,) = target.parent.iterdir()
    print(f"folder {draft}", flush=True)
    return ""


def _filled(folder: str | Path) -> str:
    (Path(folder) / "weights").write_text("many")
    print(f"folder {folder}", flush=True)
    return ""


KINDS: Mapping[str, Callable[[Path], str]] = {
    each.__name__: each for each in (worker, sandbox, wrapped, watchdog, trial, starting, temporary, staged, exported)
}
_KEPT: list[object] = []


def descendants(pid: int | None = None) -> frozenset[int]:
    """Return the processes below one, by default this one."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                stat = Path("/proc", name, "stat").read_text(errors="replace")
            except OSError:
                continue
            parents[int(name)] = int(stat.rpartition(")")[2].split()[1])
    found = {os.getpid() if pid is None else pid}
    while new := {child for child, parent in parents.items() if parent in found} - found:
        found |= new
    return frozenset(found - {os.getpid() if pid is None else pid})


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    for kind in sys.argv[2:]:
        print(kind, KINDS[kind](Path(sys.argv[1])), flush=True)
    print("all", flush=True)
    signal.pause()
