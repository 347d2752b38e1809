"""The mutants tool, on a small checkout of which it is known what its tests notice."""

from __future__ import annotations

import json
import os
import signal
import textwrap
import threading
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks import mutants
from benchmarks.main import main
from benchmarks.mutants import TIMED_OUT, CheckoutCopy, Effort, FileReport, choose_files, find_tests, try_mutants
from benchmarks.mutants_server import seconds_without_load
from benchmarks.mutations import draw_mutants

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


ANSWER = {  # of its mutants, 41 and None die, and 43 lives
    "gspo_gym/__init__.py": "",
    "gspo_gym/answer.py": "def answer():\n    return 42\n",
    "tests/test_answer.py": "from gspo_gym.answer import answer\ndef test_it():\n    assert answer() > 41\n",
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


@pytest.fixture(autouse=True)
def nothing_heavy_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "PRELOADED", ("pytest",))


@pytest.mark.slow
def test_survivors_are_those_that_the_tests_cannot_notice_and_the_checkout_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_tree(tmp_path / "root", FILES)
    before = contents(root)
    kept = tmp_path / "kept.jsonl"
    words = ["--root", str(root), "--count", "99", "--json", str(kept), "-m", ""]
    assert main(["mutants", "gspo_gym/age.py", *words]) == 0
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
    assert contents(root) == before
    (line,) = kept.read_text().splitlines()
    noticed = [trial["noticed_by"] for trial in json.loads(line)["trials"]]
    assert sorted(map(str, noticed)) == ["None"] * 3 + ["tests/test_age.py"] * 4


@pytest.mark.slow
def test_a_test_file_that_fails_without_a_mutant_is_skipped_by_name_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_tree(
        tmp_path,
        {
            **ANSWER,
            "tests/test_answer_wrong.py": "import gspo_gym.answer\ndef test_fails():\n    assert 1 == 2\n",
            "tests/test_answer_killer.py": "import os, gspo_gym.answer\ndef test_it():\n    os.kill(os.getppid(), 9)\n",
            "gspo_gym/alone.py": "ALONE = 0\n",
            "tests/test_alone.py": "from gspo_gym.alone import NONE\n",
        },
    )
    assert main(["mutants", "gspo_gym/answer.py", "gspo_gym/alone.py", "--root", str(root), "-m", ""]) == 1
    printed = capsys.readouterr().out
    assert [line.split(" after ")[0] for line in printed.splitlines() if line.startswith("  skipped")] == [
        "  skipped tests/test_answer_killer.py, which ends with status -9",  # the next test file has another process
        "  skipped tests/test_answer_wrong.py, which ends with status 1",
        "  skipped tests/test_alone.py, which ends with status 2",
    ]
    assert "FAILED tests/test_answer_wrong.py::test_fails" in printed
    assert "gspo_gym/answer.py: 2 of 3 died" in printed
    assert "gspo_gym/alone.py: 0 of 1 died" in printed
    assert printed.count("no test ran") == 1


@pytest.mark.slow
def test_no_test_file_begins_when_the_seconds_are_spent(tmp_path: Path) -> None:
    root = write_tree(
        tmp_path / "root", {**ANSWER, "tests/test_more.py": "import gspo_gym.answer\ndef test_1(): pass\n"}
    )
    with closing(CheckoutCopy(root, tmp_path / "copy", expression="")) as copied:
        ran = []
        for seconds in (60, 1e-9, 0):
            report = FileReport(Path("gspo_gym/answer.py"))
            try_mutants(copied, report, Effort(seconds=seconds))
            ran.append([test.name for test in report.tests])
            assert report.is_complete
            assert (copied.copy / report.path).read_text() == ANSWER["gspo_gym/answer.py"]
    assert ran == [["test_answer.py", "test_more.py"], ["test_answer.py"], []]


def test_the_copy_is_a_checkout_as_tests_see_it(tmp_path: Path) -> None:
    """Also for the programs that tests start, whatever their folder and variables."""
    root = write_tree(
        tmp_path / "root",
        {
            **FILES,
            ".gitignore": "ignored.py\n.venv/\n__pycache__/\n",
            "ignored.py": "",
            ".ci/run": "",
            "envs/__init__.py": "",
            "gspo_gym/cli/__init__.py": "",
            "gspo_gym/cli/main.py": "import gspo_gym_envs\ndef main():\n    print(gspo_gym_envs.__file__)\n",
            "tests/test_checkout.py": """
                import pathlib, subprocess, sys
                import gspo_gym_envs, numpy
                ROOT = pathlib.Path(__file__).parents[1]
                ENVS = f"{ROOT}/envs/__init__.py"
                def printed(*command):
                    run = subprocess.run(command, check=True, capture_output=True, text=True, cwd="/", env={})
                    return run.stdout.split()
                def test_paths():
                    assert gspo_gym_envs.__file__ == ENVS
                    assert pathlib.Path(sys.executable).parent == ROOT / ".venv/bin"
                    assert printed(ROOT / ".venv/bin/gspo-gym") == [ENVS]
                    program = "import numpy; from gspo_gym.cli.main import main; main()"
                    assert printed(sys.executable, "-I", "-c", program) == [ENVS]
                def test_git():
                    files = printed("/usr/bin/env", "git", "-C", ROOT, "ls-files")
                    assert ".ci/run" in files and "envs/__init__.py" in files and "ignored.py" not in files
                    assert not printed("/usr/bin/env", "git", "-C", ROOT, "status", "--porcelain", "gspo_gym")
                    assert not (ROOT / "ignored.py").exists()
            """,
        },
    )
    with closing(CheckoutCopy(root, tmp_path / "copy")) as copied:
        run = copied.run(Path("tests/test_checkout.py"), seconds=60)
        assert run.status == 0, copied.reason(run)


@pytest.mark.slow
def test_tests_that_hang_are_ended_with_every_process_they_started(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "root", FILES)
    with closing(CheckoutCopy(root, tmp_path / "copy", expression="")) as copied:
        limit = 8.0
        hanging = copied.run(Path("tests/test_hanging.py"), seconds=limit)
        assert hanging.status == TIMED_OUT
        assert hanging.seconds >= limit
        child = int((copied.copy / "child").read_text())
        while is_running(child):  # until the kernel has ended it
            pass


@pytest.mark.slow
def test_mutants_that_only_a_time_out_ends_are_counted_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "_TIMEOUT_FLOOR_SECONDS", 1.0)
    root = write_tree(
        tmp_path,
        {
            "gspo_gym/__init__.py": "",
            "gspo_gym/same.py": "import time\ndef same(n):\n    time.sleep(0.01)\n    return n\n",
            "gspo_gym/count.py": """
                from gspo_gym.same import same
                def count(n):
                    while same(n):
                        n -= 2
                    return n + 3
            """,
            "tests/test_count.py": "from gspo_gym.count import count\ndef test_two():\n    assert count(2) == 3\n",
        },
    )
    words = ["--root", str(root), "--count", "99", "--processes", "2", "-m", ""]
    assert main(["mutants", "gspo_gym/count.py", "gspo_gym/__init__.py", *words]) == 0
    # From 2, the changes `pass`, `n += 2`, `n -= 3` never arrive at 0. `n -= 1` does, and nobody notices. Noticed are
    # `while not n`, None, `n - 3`, `n + 4` and `n + 2`.
    printed = capsys.readouterr().out
    assert "gspo_gym/count.py: 8 of 9 died, 3 by time-out" in printed
    assert "gspo_gym/__init__.py: 0 of 0 died" in printed
    assert "all files: 8 of 9 died, 3 by time-out" in printed


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
            "tests/unit/room/test_importer.py": "import gspo_gym.room.pool, gspo_gym.x, gspo_gym.y, gspo_gym.z",
            "tests/unit/else/test_pool.py": "import gspo_gym.room.pool, gspo_gym.x",
            "tests/unit/other/test_pool.py": "import gspo_gym.other.pool",
            "tests/unit/test_wide.py": "from gspo_gym.room.pool import A\nimport gspo_gym.x, gspo_gym.y",
            "tests/contract/test_narrow.py": "from gspo_gym.room.pool import A",
            "tests/unit/test_none.py": "from gspo_gym.room.pools import A",
            "tests/golden/test_formulas.py": "import gspo_gym.room.pool",
            "tests/golden/test_others.py": "import gspo_gym.other.pool",
        },
    )
    assert [str(test) for test in find_tests(Path("gspo_gym/room/pool.py"), root)] == [
        "tests/golden/test_formulas.py",
        "tests/unit/room/test_pool.py",
        "tests/unit/room/test_pool_limits.py",
        "tests/unit/room/test_importer.py",
        "tests/unit/else/test_pool.py",
        "tests/contract/test_narrow.py",
        "tests/unit/test_wide.py",
    ]
    assert [*find_tests(Path("gspo_gym/room/doc.py"), root)] == [Path("gspo_gym/room/doc.py")]


def test_the_tests_of_the_modules_which_import_a_module_follow_nearest_first(tmp_path: Path) -> None:
    root = write_tree(
        tmp_path,
        {
            "gspo_gym/room/rules.py": "",
            "gspo_gym/room/wide.py": "from gspo_gym.room import rules\nimport gspo_gym.errors",
            "gspo_gym/room/near.py": "from gspo_gym.room.rules import A",
            "gspo_gym/far.py": "import gspo_gym.room.rules",
            "gspo_gym/farther.py": "import gspo_gym.far",
            "gspo_gym/room/script.py": "",
            "gspo_gym/starter.py": "COMMANDS = {'rules': 'gspo_gym.room.rules:main'}, parent / 'room' / 'script.py'",
            "gspo_gym/room/start.py": "path.with_name('script.py')",
            "tests/test_direct.py": "from gspo_gym.room.rules import A",
            "tests/test_far.py": "import gspo_gym.far, gspo_gym.room.near",  # found twice, listed once
            "tests/test_farther.py": "import gspo_gym.farther",
            "tests/room/test_near_edges.py": "import gspo_gym.room.near",
            "tests/room/test_wide.py": "from gspo_gym.room.wide import A",
            "tests/room/test_wide_again.py": "from gspo_gym.room.wide import A",
            "tests/unit/test_starting.py": "import gspo_gym.starter",
            "tests/unit/room/test_start.py": "import gspo_gym.room.start",
            **{
                f"tests/{folder}/test_rules.py": "import gspo_gym.room.rules"
                for folder in ("cluster", "vllm", "browser")
            },
        },
    )
    assert [test.name for test in find_tests(Path("gspo_gym/room/rules.py"), root)] == [
        "test_direct.py",
        "test_wide.py",
        "test_near_edges.py",
        "test_wide_again.py",
        "test_far.py",
        "test_starting.py",  # of a module which only names it
        "test_farther.py",
    ]
    assert [test.name for test in find_tests(Path("gspo_gym/room/script.py"), root)] == ["test_start.py"]


def test_a_sample_of_modules_stays_when_another_module_comes(tmp_path: Path) -> None:
    long = "x = 1\n" * 81
    files = {f"gspo_gym/room/module{i}.py": long for i in range(30)}
    root = write_tree(tmp_path, {**files, "gspo_gym/short.py": "x = 1\n" * 80, "gspo_gym/__init__.py": long})
    drawn = choose_files(["gspo_gym/short.py"], root, sample=31, seed=3)
    assert drawn[0] == Path("gspo_gym/short.py")
    assert sorted(map(str, drawn[1:])) == sorted(files)
    assert drawn[1:] != choose_files([], root, sample=30, seed=4)
    removed = drawn[5]
    (root / removed).unlink()
    assert choose_files([], root, sample=20, seed=3) == [path for path in drawn[1:22] if path != removed]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_measurement_prints_what_is_known_and_leaves_no_process_and_no_folder(
    tmp_path: Path, number: signal.Signals, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = FILES["tests/test_hanging.py"].replace('"child"', f'"{tmp_path}/child"')
    later = f"{hanging}\n            import gspo_gym.answer"
    root = write_tree(tmp_path / "root", {**ANSWER, "gspo_gym/other.py": "", "tests/test_later.py": later})
    (tmp_path / "copies").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "copies"))
    os.mkfifo(tmp_path / "child")
    children = []

    def interrupt() -> None:
        children.append(int((tmp_path / "child").read_text()))  # waits for the second test file
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    words = ["--root", str(root), "--json", str(tmp_path / "kept.jsonl"), "-m", ""]
    assert main(["mutants", "gspo_gym/answer.py", "gspo_gym/other.py", *words]) == 128 + number
    thread.join()
    printed = capsys.readouterr()
    assert printed.err == "stopped\n"
    assert "gspo_gym/answer.py: 2 of 3 died, 0 by time-out" in printed.out
    assert "stopped; tests/test_answer.py\n" in printed.out
    (line,) = (tmp_path / "kept.jsonl").read_text().splitlines()
    assert json.loads(line)["is_complete"] is False
    assert list((tmp_path / "copies").iterdir()) == []
    while is_running(children[0]):  # until the kernel has ended it
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
