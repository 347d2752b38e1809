"""The house rules that a machine can check: who imports whom, sizes, docstrings, and what may load when.

Imports are read with `ast`, so those under TYPE_CHECKING and inside functions count. Every rule is also shown a small
tree that breaks it.
"""

from __future__ import annotations

import ast
import fnmatch
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A unit is a ground file, a room, or config/build, which stands above the rest of its room. Imports go to lower floors.
FLOORS = {
    "errors": 0,
    "seeding": 0,
    "types": 1,
    "base": 2,
    "env": 3,
    "chat": 3,
    "engine": 3,
    "learning": 3,
    "rollout": 4,
    "policy": 4,
    "judge": 5,
    "credit": 5,
    "remote": 6,
    "diagnosis": 7,
    "run": 8,
    "cluster": 8,
    "config": 9,
    "config.build": 10,
    "cli": 11,
    "train": 12,
    "": 12,  # the public names
}
# Beyond the floors: what a unit must not import from outside, or from lower floors.
HEAVY = ("torch", "transformers", "peft", "tokenizers", "safetensors", "vllm", "ray", "fastapi")
FORBIDDEN = {
    "errors": ("gspo_gym", "numpy", "pydantic", *HEAVY),
    "seeding": ("gspo_gym", "pydantic", *HEAVY),
    "types": ("pydantic", *HEAVY),
    "base": HEAVY,
    "env": HEAVY,
    "judge": ("gspo_gym.learning", *(name for name in HEAVY if name != "fastapi")),  # it serves, too
    "rollout": ("gspo_gym.learning", *HEAVY),
    "credit": HEAVY,
    "remote": ("gspo_gym.learning", *(name for name in HEAVY if name != "fastapi")),  # it serves
    "diagnosis": (
        *(f"gspo_gym.engine.{kind}" for kind in ("local", "scripted", "vllm", "endpoint")),
        "transformers",
        "peft",
    ),
    "run": (
        "gspo_gym.engine.local",
        "gspo_gym.engine.scripted",
        "gspo_gym.engine.vllm",
        "gspo_gym.engine.endpoint",
        "transformers",
        "peft",
    ),
    "cluster": tuple(f"gspo_gym.engine.{kind}" for kind in ("local", "scripted", "vllm", "endpoint")),
    "config": ("gymnasium", *HEAVY),
}
_OPEN = ("env", "types", "errors", "seeding", "base")
ENVS_MAY_IMPORT = ("gspo_gym_envs", *(f"gspo_gym.{room}" for room in _OPEN))
UNSAFE_MODULES = ("pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "random")
UNSAFE_CALLS = {
    "torch.load": "pickle",
    "torch.save": "pickle",
    "yaml.load": "builds any object",
    "torch.manual_seed": "global random state",
    "np.random.seed": "global random state",
    "np.random.rand": "global random state",
    "np.random.randint": "global random state",
    "np.random.choice": "global random state",
    "np.random.shuffle": "global random state",
}
MAX_FILE, MAX_FUNCTION, MAX_CLASS, MAX_NESTING = 600, 60, 300, 4  # all: fewer than


@dataclass(frozen=True)
class Module:
    """A parsed file: its dotted name, its imports (absolute, of modules where they are modules) and its text."""

    name: str
    path: Path
    text: str
    tree: ast.Module
    imports: frozenset[str] = field(default=frozenset())

    @property
    def unit(self) -> str:
        """The unit of FLOORS that the module belongs to; "" for gspo_gym itself."""
        return unit_of(self.name)

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


def unit_of(name: str) -> str:
    """The ground file or room of a dotted name, or config.build; "" for gspo_gym itself."""
    return "config.build" if is_within(name, "gspo_gym.config.build") else name.partition(".")[2].partition(".")[0]


def read_tree(folder: Path, package: str) -> dict[str, Module]:
    """All modules of a package by dotted name."""
    modules = {}
    for path in sorted(folder.rglob("*.py")):
        parts = [package, *path.relative_to(folder).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        modules[name] = Module(name, path, text, ast.parse(text))
    return {
        name: Module(name, m.path, m.text, m.tree, frozenset(imports_of(m, set(modules))))
        for name, m in modules.items()
    }


def imports_of(module: Module, known: set[str]) -> Iterator[str]:
    """What a module imports, wherever in the file; `from a import b` is a.b where that is a module, else a."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
                base = ".".join([*above[: len(above) - node.level + 1], *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield whole if whole in known or not base.startswith("gspo_gym") else base


def is_within(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


def floor_violations(modules: Mapping[str, Module], floors: Mapping[str, int]) -> list[str]:
    """Imports between units that do not go to a lower floor, and modules without a floor."""
    problems = []
    for module in modules.values():
        if module.unit not in floors:
            problems.append(f"{module.name}: has no floor; give it one in FLOORS")
            continue
        for target in sorted(t for t in module.imports if is_within(t, "gspo_gym")):
            here, there = floors[module.unit], floors.get(unit_of(target), -1)
            if unit_of(target) != module.unit and there >= here:
                problems.append(f"{module.name} (floor {here}): imports {target} (floor {there})")
    return problems


def forbidden_imports(modules: Mapping[str, Module], forbidden: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Imports that a unit must not have although the floors allow them."""
    return [
        f"{module.name}: imports {target}"
        for module in modules.values()
        for target in sorted(module.imports)
        if any(is_within(target, package) for package in forbidden.get(module.unit, ()))
        or is_within(target, "gspo_gym_envs")
    ]


def env_violations(modules: Mapping[str, Module]) -> list[str]:
    """Imports of ours that an environment author would not have."""
    return [
        f"{module.name}: imports {target}"
        for module in modules.values()
        for target in sorted(module.imports)
        if target.startswith("gspo_gym") and not any(is_within(target, allowed) for allowed in ENVS_MAY_IMPORT)
    ]


def cycles(modules: Mapping[str, Module]) -> list[str]:
    """Every circle of imports, found once; a package is what its __init__ imports."""
    found: dict[frozenset[str], str] = {}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        if name in trail:
            circle = trail[trail.index(name) :]
            found.setdefault(frozenset(circle), " -> ".join([*circle, name]))
        elif name not in done and name in modules:
            for target in sorted(modules[name].imports):
                visit(target, (*trail, name))
            done.add(name)

    for name in modules:
        visit(name, ())
    return list(found.values())


def size_violations(module: Module) -> list[str]:
    """Files, functions and classes that are too long, and functions that are nested too deeply."""
    problems = []
    if (lines := len(module.text.splitlines())) >= MAX_FILE:
        problems.append(f"{module.name}: {lines} lines, fewer than {MAX_FILE} allowed")
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            limit = MAX_CLASS if isinstance(node, ast.ClassDef) else MAX_FUNCTION
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length >= limit:
                problems.append(f"{module.name}.{node.name}: {length} lines, fewer than {limit} allowed")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (depth := nesting(node)) >= MAX_NESTING:
            problems.append(f"{module.name}.{node.name}: nested {depth} deep, less than {MAX_NESTING} allowed")
    return problems


BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)


def nesting(node: ast.AST) -> int:
    """The deepest block in block; `elif` is as deep as its `if`, and a function inside starts anew."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        is_elif = isinstance(child, ast.If) and isinstance(node, ast.If) and node.orelse == [child]
        deepest = max(deepest, nesting(child) + (isinstance(child, BLOCKS) and not is_elif))
    return deepest


def missing_docstrings(module: Module) -> list[str]:
    """The module, its public functions and its public classes, where they have no docstring; overloads need none."""
    nodes = [module.tree, *module.tree.body]
    return [
        f"{module.name}{'.' + node.name if not isinstance(node, ast.Module) else ''}: has no docstring"
        for node in nodes
        if isinstance(node, ast.Module)
        or (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"))
        if ast.get_docstring(node) is None
        and "overload" not in [ast.unparse(d) for d in getattr(node, "decorator_list", [])]
    ]


def unsafe_code(module: Module) -> list[str]:
    """Pickle in any form, and global random state."""
    problems = [
        f"{module.name}: imports {target}"
        for target in sorted(module.imports)
        if any(is_within(target, unsafe) for unsafe in UNSAFE_MODULES)
    ]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and (reason := UNSAFE_CALLS.get(ast.unparse(node))):
            problems.append(f"{module.name}:{node.lineno}: {ast.unparse(node)}: {reason}")
    return problems


@pytest.fixture(scope="module")
def house() -> dict[str, Module]:
    return read_tree(ROOT / "gspo_gym", "gspo_gym")


@pytest.fixture(scope="module")
def envs() -> dict[str, Module]:
    return read_tree(ROOT / "envs", "gspo_gym_envs")


def test_imports_go_down_only(house: dict[str, Module]) -> None:
    assert floor_violations(house, FLOORS) == []


def test_the_page_for_contributors_shows_these_floors_and_names_paths_that_exist() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", page, re.MULTILINE)
    shown = {unit.strip("` "): int(floor) for floor, units in rows for unit in units.split(",")}
    assert shown == {unit: floor for unit, floor in FLOORS.items() if unit}
    rooms = set(re.findall(r"^\| `gspo_gym/(\w+)` \|", page, re.MULTILINE))
    assert rooms == {path.name for path in (ROOT / "gspo_gym").iterdir() if (path / "__init__.py").is_file()}
    named = set(re.findall(r"`((?:gspo_gym|tests|envs|benchmarks|configs)/[\w/.]+)`", page))
    assert len(named) > 30
    assert [path for path in sorted(named) if "NAME" not in path and not (ROOT / path).exists()] == []


def test_no_module_imports_what_its_place_forbids(house: dict[str, Module]) -> None:
    assert forbidden_imports(house, FORBIDDEN) == []


def test_no_imports_run_in_a_circle(house: dict[str, Module], envs: dict[str, Module]) -> None:
    assert cycles(house | envs) == []


def test_bundled_environments_import_what_a_strangers_environment_could(envs: dict[str, Module]) -> None:
    assert env_violations(envs) == []


def test_folders_of_the_package_have_an_init_that_holds_a_docstring_only(house: dict[str, Module]) -> None:
    inits = [m for m in house.values() if m.is_package and m.unit]
    # A folder without one is no package: an editable install imports it, and the wheel leaves it out.
    folders = {m.path.parent for m in house.values() if m.unit and m.path.parent != ROOT / "gspo_gym"}
    assert {m.path.parent for m in inits} == folders
    assert [m.name for m in inits if len(m.tree.body) != 1 or ast.get_docstring(m.tree) is None] == []


def test_files_functions_and_classes_are_short_and_shallow(house: dict[str, Module], envs: dict[str, Module]) -> None:
    assert [problem for module in (house | envs).values() for problem in size_violations(module)] == []


def test_everything_public_has_a_docstring(house: dict[str, Module]) -> None:
    assert [problem for module in house.values() for problem in missing_docstrings(module)] == []


def stale_names(module: Module, paths: Collection[str]) -> list[str]:
    """Files named in backticks that are not there, and lists of callers, which go stale."""
    named = re.findall(r"`([\w/]+\.py)`", module.text)
    missing = [name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in paths)]
    return [f"{module.name}: names {name}, which is not there" for name in missing] + [
        f"{module.name}: says who calls it: {line.strip()}"
        for line in module.text.splitlines()
        if re.search(r"\b(Called|Used) by [`a-z]", line)
    ]


def test_files_that_are_named_exist_and_callers_are_not_listed(
    house: dict[str, Module], envs: dict[str, Module]
) -> None:
    folders = ("gspo_gym", "envs", "benchmarks", "examples", "tests")
    paths = [path.relative_to(ROOT).as_posix() for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert [problem for module in (house | envs).values() for problem in stale_names(module, paths)] == []


def test_a_name_that_went_stale_is_found(tmp_path: Path) -> None:
    text = '"""Reads what `gone.py` and `env/b.py` write. Called by `env/b.py`."""'
    bad = tree(tmp_path, {"a.py": text, "env/b.py": ""})
    assert stale_names(bad["gspo_gym.a"], ["gspo_gym/a.py", "gspo_gym/env/b.py"]) == [
        "gspo_gym.a: names gone.py, which is not there",
        f"gspo_gym.a: says who calls it: {text}",
    ]


def test_nothing_is_pickled_and_nobody_touches_global_random_state(
    house: dict[str, Module], envs: dict[str, Module]
) -> None:
    allowed = [
        "gspo_gym.env.checks.play: imports random",  # reads it, to see that an environment leaves it alone
        "gspo_gym.env.workers.worker: imports random.seed",  # in worker processes, which play one episode at a time
        "gspo_gym_envs.suites.reasoning_gym: imports random",  # gives a foreign suite generators of its own
    ]
    assert [problem for module in (house | envs).values() for problem in unsafe_code(module)] == allowed


# What a fresh process may have loaded afterwards, and how long it may take. The limit on the time is ten times what a
# 2-core machine needs, so that it finds a heavy import and not a busy machine.
STARTS = {
    "import gspo_gym.config.run_config": (*HEAVY, "gymnasium", "rich"),
    "import gspo_gym.env.core, gspo_gym.env.registry, gspo_gym.env.checks.checker": HEAVY,
    "import sys, runpy; sys.argv = ['gspo-gym', '--help']; runpy.run_module('gspo_gym.cli', run_name='__main__')": (
        *HEAVY,
        "gymnasium",
    ),
}


@pytest.mark.parametrize("code", STARTS, ids=("config", "env", "help"))
def test_light_things_start_without_torch(code: str, record_property: Callable[[str, object], None]) -> None:
    probe = textwrap.dedent(f"""
        import sys, time
        started = time.perf_counter()
        try:
            {code}
        except SystemExit as stop:
            assert not stop.code, stop.code
        print("SECONDS", time.perf_counter() - started)
        print("LOADED", *[name for name in {STARTS[code]!r} if name in sys.modules])
    """)
    started = time.perf_counter()
    finished = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False, cwd=ROOT)
    process_seconds = time.perf_counter() - started
    assert finished.returncode == 0, finished.stderr
    lines = dict(line.split(" ", 1) if " " in line else (line, "") for line in finished.stdout.splitlines()[-2:])
    print(f"{code[:70]}: {float(lines['SECONDS']):.2f} s, the whole process {process_seconds:.2f} s")
    record_property("seconds", lines["SECONDS"])
    assert lines["LOADED"].split() == []


# --- the rules can fail -----------------------------------------------------------------------------------------------


def tree(folder: Path, files: Mapping[str, str], package: str = "gspo_gym") -> dict[str, Module]:
    """A package written to disk and read back."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return read_tree(folder, package)


def test_an_import_that_goes_up_is_found_also_inside_functions_and_under_type_checking(tmp_path: Path) -> None:
    bad = tree(
        tmp_path,
        {
            "types.py": "def f():\n    from gspo_gym.run.trainer import Trainer",
            "seeding.py": "from gspo_gym.errors import GymError",
            "base/settings.py": """
                from typing import TYPE_CHECKING
                if TYPE_CHECKING:
                    from gspo_gym import config
            """,
            "env/core.py": "import gspo_gym.types",
            "run/__init__.py": "",
            "run/trainer.py": "from gspo_gym import Trainer",
            "config/__init__.py": "from gspo_gym.config.build.trainer import build",
            "config/build/trainer.py": "from gspo_gym.config import apps",
            "surprise.py": "",
        },
    )
    assert floor_violations(bad, FLOORS) == [
        "gspo_gym.base.settings (floor 2): imports gspo_gym.config (floor 9)",
        "gspo_gym.config (floor 9): imports gspo_gym.config.build.trainer (floor 10)",
        "gspo_gym.run.trainer (floor 8): imports gspo_gym (floor 12)",
        "gspo_gym.seeding (floor 0): imports gspo_gym.errors (floor 0)",
        "gspo_gym.surprise: has no floor; give it one in FLOORS",
        "gspo_gym.types (floor 1): imports gspo_gym.run.trainer (floor 8)",
    ]


def test_an_import_that_goes_sideways_between_rooms_is_found(tmp_path: Path) -> None:
    bad = tree(
        tmp_path,
        {
            "env/__init__.py": "",
            "env/core.py": "from ..chat.renderer import Renderer",
            "chat/__init__.py": "",
            "chat/renderer.py": "",
            "chat/parsing.py": "from gspo_gym.chat import renderer",
        },
    )
    assert floor_violations(bad, FLOORS) == ["gspo_gym.env.core (floor 3): imports gspo_gym.chat.renderer (floor 3)"]


def test_torch_in_the_wrong_place_is_found(tmp_path: Path) -> None:
    bad = tree(
        tmp_path,
        {
            "env/core.py": "def f():\n    import torch.nn",
            "rollout/pool.py": "from gspo_gym.learning.losses import k3",
            "chat/x.py": "import torch, gspo_gym_envs.guess_number",
        },
    )
    assert forbidden_imports(bad, FORBIDDEN) == [
        "gspo_gym.chat.x: imports gspo_gym_envs.guess_number",
        "gspo_gym.env.core: imports torch.nn",
        "gspo_gym.rollout.pool: imports gspo_gym.learning.losses",
    ]


def test_a_circle_is_found_also_through_relative_imports(tmp_path: Path) -> None:
    bad = tree(
        tmp_path,
        {"chat/__init__.py": "", "chat/a.py": "from . import b", "chat/b.py": "def f():\n    from .c import x\n"}
        | {"chat/c.py": "import gspo_gym.chat.a", "chat/d.py": "from gspo_gym.chat import a"},
    )
    assert cycles(bad) == ["gspo_gym.chat.a -> gspo_gym.chat.b -> gspo_gym.chat.c -> gspo_gym.chat.a"]


def test_an_environment_that_reaches_inside_is_found(tmp_path: Path) -> None:
    bad = tree(
        tmp_path,
        {"maze/env.py": "from gspo_gym.env.core import TextEnv\nfrom gspo_gym.rollout.pool import RolloutPool"},
        package="gspo_gym_envs",
    )
    assert env_violations(bad) == ["gspo_gym_envs.maze.env: imports gspo_gym.rollout.pool"]


def test_what_is_too_long_or_too_deep_is_found_at_the_limit_and_not_below(tmp_path: Path) -> None:
    def block(lines: int) -> str:
        return "\n".join(f"    x = {i}" for i in range(lines))

    bad = tree(
        tmp_path,
        {
            "file_599.py": "x = 1\n" * 599,
            "file_600.py": "x = 1\n" * 600,
            "function_59.py": f"def f():\n{block(58)}",
            "function_60.py": f"async def f():\n{block(59)}",
            "class_300.py": f"class C:\n{block(299)}",
            "nested_3.py": "def f():\n for a in b:\n  with c:\n   if d:\n    pass\n   elif e:\n    pass\n",
            "nested_4.py": "def f():\n for a in b:\n  with c:\n   try:\n    if d:\n     pass\n   finally:\n    pass\n",
        },
    )
    assert [problem for module in bad.values() for problem in size_violations(module)] == [
        "gspo_gym.class_300.C: 300 lines, fewer than 300 allowed",
        "gspo_gym.file_600: 600 lines, fewer than 600 allowed",
        "gspo_gym.function_60.f: 60 lines, fewer than 60 allowed",
        "gspo_gym.nested_4.f: nested 4 deep, less than 4 allowed",
    ]


def test_missing_docstrings_pickle_and_global_randomness_are_found(tmp_path: Path) -> None:
    bad = tree(
        tmp_path,
        {
            "a.py": '"""Said."""\nclass C: ...\ndef f(): ...\ndef _g(): ...\n',
            "b.py": "import pickle\nimport torch\nx = torch.load('f')\ny = torch.nn.Module.load\n",
        },
    )
    assert missing_docstrings(bad["gspo_gym.a"]) == [
        "gspo_gym.a.C: has no docstring",
        "gspo_gym.a.f: has no docstring",
    ]
    assert missing_docstrings(bad["gspo_gym.b"]) == ["gspo_gym.b: has no docstring"]
    assert unsafe_code(bad["gspo_gym.b"]) == ["gspo_gym.b: imports pickle", "gspo_gym.b:3: torch.load: pickle"]


def test_no_folder_is_passed_over_when_tests_are_collected(pytestconfig: pytest.Config) -> None:
    """pytest passes over folders called `build` by itself: 14 files of tests had once not been run for days."""
    passed_over = pytestconfig.getini("norecursedirs")
    parents = {path.parent for root in ("tests", "gspo_gym", "envs") for path in (ROOT / root).rglob("*.py")}
    names = {name for folder in parents for name in folder.relative_to(ROOT).parts}
    assert "build" in names
    assert [name for name in names for pattern in passed_over if fnmatch.fnmatch(name, pattern)] == []
