"""The mutants tool, on a small checkout of which it is known what its tests notice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks import mutants
from benchmarks.main import main
from benchmarks.mutants import TIMED_OUT, copied_checkout, find_tests, run_mutants, try_mutants
from benchmarks.mutants_server import seconds_without_load
from benchmarks.mutations import draw_mutants
from gspo_gym.errors import UsageError

FILES = {
    "gspo_gym/__init__.py": "",
    "gspo_gym/build/limits.py": "ADULT = 18\n",
    "gspo_gym/age.py": """
        # Old enough.
        def is_adult(age: int = 18) -> bool:
            return age >= 18
    """,
    "tests/test_age.py": """
        from gspo_gym.age import is_adult
        from gspo_gym.build.limits import ADULT
        def test_adult_and_three() -> None:
            assert is_adult(ADULT) and not is_adult(3)
    """,
    "tests/test_hanging.py": """
        import os, pathlib, subprocess, sys
        def test_waits_for_its_own_process() -> None:
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            pathlib.Path("child").write_text(str(child.pid))
            child.wait()
    """,
}


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(textwrap.dedent(text), encoding="utf-8")
    return root


def contents(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_survivors_are_those_that_the_tests_cannot_notice_and_the_checkout_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_tree(tmp_path, FILES)
    before = contents(root)
    assert run_mutants(["gspo_gym/age.py"], count=99, seed=0, tests=[], root=root) == 0
    printed = capsys.readouterr().out
    # 18 and 3 tell `>=` from `>` and `<`, a value from None, and 18 from 19. Not 18 from 17, and not the default, which
    # no test takes. Of the 7 changes (`>`, `<`, None, 2 constants, 2 defaults) 4 die.
    survived = [line for line in printed.splitlines() if line.startswith("+")]
    assert sorted(survived) == [
        "+    return age >= 17",
        "+def is_adult(age: int = 17) -> bool:",
        "+def is_adult(age: int = 19) -> bool:",
    ]
    assert "gspo_gym/age.py: 4 of 7 died, 0 by time-out" in printed
    assert "0.57" in printed  # 4 / 7
    assert contents(root) == before


@pytest.mark.slow
def test_tests_that_hang_are_ended_with_every_process_they_started(tmp_path: Path) -> None:
    root = write_tree(tmp_path, FILES)
    with copied_checkout(root) as copied:
        hanging = copied.run([Path("tests/test_hanging.py")], seconds=8)
        assert hanging.status == TIMED_OUT
        assert hanging.seconds >= 8
        child = int((copied.copy / "child").read_text())
        while is_running(child):  # until the kernel has ended it
            pass
        (copied.copy / "tests/test_age.py").write_text("def test_fails() -> None:\n    assert 1 == 2\n")
        with pytest.raises(UsageError, match=r"tests/test_age\.py ends with status 1 without a mutant"):
            try_mutants(copied, Path("gspo_gym/age.py"), tests=[Path("tests/test_age.py")], count=1, seed=0)


@pytest.mark.slow
def test_mutants_that_only_a_time_out_ends_are_counted_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "_TIMEOUT_FLOOR_SECONDS", 1.0)
    root = write_tree(
        tmp_path,
        {
            "gspo_gym/__init__.py": "",
            "gspo_gym/count.py": "def count(n):\n    while n:\n        n -= 2\n    return n + 3\n",
            "tests/test_count.py": "from gspo_gym.count import count\ndef test_two():\n    assert count(2) == 3\n",
        },
    )
    assert run_mutants(["gspo_gym/count.py"], count=99, seed=0, tests=[], root=root) == 0
    # From 2, the changes `pass`, `n += 2`, `n -= 3` never arrive at 0. `n -= 1` does, and nobody notices. Noticed are
    # `while not n`, None, `n - 3`, `n + 4` and `n + 2`.
    printed = capsys.readouterr().out
    assert "gspo_gym/count.py: 8 of 9 died, 3 by time-out" in printed


@pytest.mark.parametrize(
    ("ran", "waited", "counted"),
    [
        (0.0, 0.0, 4.0),  # it slept
        (4.0, 0.0, 4.0),  # a core of its own
        (1.0, 3.0, 1.0),  # one thread that got a quarter of a core
        (0.5, 0.5, 3.5),  # half a second's delay, then asleep
        (6.0, 6.0, 2.0),  # three threads that had a core half of the time
    ],
)
def test_time_without_a_core_does_not_count_towards_the_limit(ran: float, waited: float, counted: float) -> None:
    assert seconds_without_load(4.0, ran=ran, waited=waited) == pytest.approx(counted)


def test_tests_are_found_by_name_and_by_import_narrowest_first(tmp_path: Path) -> None:
    root = write_tree(
        tmp_path,
        {
            "gspo_gym/room/pool.py": "",
            "gspo_gym/room/doc.py": "# >>> 1\n",
            "tests/unit/room/test_pool.py": "from gspo_gym.room import pool\nimport gspo_gym.errors",
            "tests/unit/room/test_pool_limits.py": "import gspo_gym.room.pool",
            "tests/unit/other/test_pool.py": "import gspo_gym.other.pool",
            "tests/unit/test_wide.py": "from gspo_gym.room.pool import A\nimport gspo_gym.x, gspo_gym.y",
            "tests/contract/test_narrow.py": "from gspo_gym.room.pool import A",
            "tests/unit/test_none.py": "from gspo_gym.room.pools import A",
        },
    )
    assert [str(test) for test in find_tests(Path("gspo_gym/room/pool.py"), root)] == [
        "tests/unit/room/test_pool.py",
        "tests/unit/room/test_pool_limits.py",
        "tests/contract/test_narrow.py",
        "tests/unit/test_wide.py",
    ]
    assert find_tests(Path("gspo_gym/room/doc.py"), root) == (Path("gspo_gym/room/doc.py"),)


def test_where_few_tests_import_a_module_those_of_the_modules_which_do_follow_nearest_first(tmp_path: Path) -> None:
    root = write_tree(
        tmp_path,
        {
            "gspo_gym/room/rules.py": "",
            "gspo_gym/room/wide.py": "from gspo_gym.room import rules\nimport gspo_gym.errors",
            "gspo_gym/room/near.py": "from gspo_gym.room.rules import A",
            "gspo_gym/far.py": "import gspo_gym.room.rules",
            "gspo_gym/farther.py": "import gspo_gym.far",
            "tests/test_direct.py": "from gspo_gym.room.rules import A",
            "tests/test_far.py": "import gspo_gym.far, gspo_gym.room.near",  # found twice, listed once
            "tests/test_farther.py": "import gspo_gym.farther",
            "tests/room/test_near_edges.py": "import gspo_gym.room.near",
            "tests/room/test_wide.py": "from gspo_gym.room.wide import A",
            "tests/room/test_wide_again.py": "from gspo_gym.room.wide import A",
            "tests/elsewhere/test_rules.py": "from gspo_gym.room.rules import A",
            "tests/elsewhere/requirements-elsewhere.txt": "",
        },
    )
    assert [test.name for test in find_tests(Path("gspo_gym/room/rules.py"), root)] == [
        "test_direct.py",
        "test_near_edges.py",
        "test_wide.py",
        "test_far.py",
        "test_wide_again.py",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_measurement_leaves_no_process_no_folder_and_no_traceback(
    tmp_path: Path, number: signal.Signals
) -> None:
    hanging = FILES["tests/test_hanging.py"].replace('"child"', f'"{tmp_path}/child"')
    root = write_tree(
        tmp_path / "checkout", {**FILES, "tests/test_age.py": f"import gspo_gym.age\n{textwrap.dedent(hanging)}"}
    )
    (tmp_path / "copies").mkdir()
    command = subprocess.Popen(
        [sys.executable, "-m", "benchmarks", "mutants", "gspo_gym/age.py"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "TMPDIR": str(tmp_path / "copies")},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not (tmp_path / "child").is_file() or not (tmp_path / "child").read_text():  # until the tests run
        assert command.poll() is None
    os.killpg(command.pid, number)  # as a terminal does
    _, errors = command.communicate(timeout=60)
    assert (command.returncode, errors) == (128 + number, "stopped\n")
    assert list((tmp_path / "copies").iterdir()) == []
    while is_running(int((tmp_path / "child").read_text())):  # until the kernel has ended it
        pass


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if a < b:\n    f()\n", {"if a <= b:", "if a >= b:", "    pass"}),
        ("x = (a - b) * c\n", {"x = (a + b) * c", "x = (a - b) / c"}),
        ("x = a[0] and not b\n", {"x = a[1] and not b", "x = a[0] or not b", "x = a[0] and b"}),
        (
            "x = max(a, 'ü', b % 2)\n",
            {"x = a", "x = max(a, 'ü', b * 2)", "x = max(a, 'ü', b % 3)", "x = max(a, 'ü', b % 1)"},
        ),
        ("while go():\n    n += 1\n", {"while not go():", "    pass", "    n -= 1", "    n += 2", "    n += 0"}),
        (
            "def f(x: Literal[1] = True) -> 1:\n    return x\n",
            {"def f(x: Literal[1] = False) -> 1:", "    return None"},
        ),
        ("def f():\n    '''Say 1.'''\n    assert a < 1\n    return None\n", set()),
        ("x = [*zip(a, b, strict=True)], f'{1 + a}'\n", set()),
        ("x = c if a else b\n", {"x = c if not a else b"}),
        ("x = 0 < a <= b\n", {"x = 1 < a <= b", "x = 0 <= a <= b", "x = 0 < a < b"}),
        ("if a:\n    raise E('no')\n", {"if not a:", "    pass"}),
        ("x = 0.5, 1e37\n", {"x = 1.5, 1e37", "x = 0.5, 2e+37"}),  # 1e37 + 1 is 1e37
    ],
)
def test_every_change_is_one_line_and_the_rest_of_the_text_stays(old: str, new: set[str]) -> None:
    drawn = draw_mutants(old, "x.py", count=99, seed=0)
    changed = [[line for line in m.text.splitlines() if line not in old.splitlines()] for m in drawn]
    assert sorted(line for lines in changed for line in lines) == sorted(new)
    assert all(len(m.text.splitlines()) == len(old.splitlines()) for m in drawn)


def test_the_draw_is_seeded_per_file_and_without_replacement() -> None:
    text = "\n".join(f"x{i} = y < {i + 1}" for i in range(40))
    first = draw_mutants(text, "a.py", count=20, seed=3)
    assert first == draw_mutants(text, "a.py", count=20, seed=3)
    assert len({mutant.text for mutant in first}) == 20
    assert first != draw_mutants(text, "a.py", count=20, seed=4)
    assert first != draw_mutants(text, "b.py", count=20, seed=3)
    assert [mutant.line for mutant in first] == sorted(mutant.line for mutant in first)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mutants"], "name the files to mutate"),
        (["mutants", "README.md"], "README.md: expected a Python file below"),
        (["mutants", "/etc/hostname"], "expected a Python file below"),
        (["faults", "gspo_gym/types.py"], "faults takes no files"),
    ],
)
def test_arguments_that_name_no_file_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
