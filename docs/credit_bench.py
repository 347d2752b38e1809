"""The page and the figure of CreditBench, from docs/credit_bench.jsonl: `python docs/credit_bench.py` writes both.

A line of the file is one game and policy, as `gspo-gym credit --json` writes it. `python docs/credit_bench.py measure`
plays all games again, two at a time, and writes the lines; `measure NAME ...` those games alone, with `--policy MODEL`
played by a model, such as a run's folder, beside the scripted players. `auto NAME ...` compares `advantages.level =
"auto"` with the levels that it chooses from, on seven games and five sets of tasks, in docs/credit_auto.jsonl. A test
fails while the page is not what the lines say.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

HERE = Path(__file__).parent
ROOT = HERE.parent
LINES = HERE / "credit_bench.jsonl"
AUTO_LINES = HERE / "credit_auto.jsonl"
PAGE = HERE / "explanations" / "credit_bench.md"
FIGURE = ROOT / "examples" / "figures" / "credit_bench.svg"

# Each game at the small level of its configuration: the policy, and how many tasks a measurement has.
GAMES = {
    "quickstart": ("scripted:reference+random", 60),
    "tic_tac_toe": ("scripted:reference+random", 60),
    "frozen_lake": ("scripted:reference+random", 40),
    "countdown": ("scripted:reference+random", 40),
    "wordle": ("scripted:reference+random", 40),
    "homestead": ("scripted:random", 40),
    "support_desk": ("scripted:reference+random", 40),
}
BENCH = tuple(GAMES)[:6]
NUM_MODEL_TASKS = 24
LEVELS = ("trajectory, leave one out", "turn, leave one out", "auto, leave one out")
NUM_SETS, SET_SIZE = 5, 8  # of tasks, each as a batch of so many groups

INTRODUCTION = """# Which credit is right

CreditBench forks episodes at every turn: it plays the recorded actions again under the same seed and goes on with
fresh draws. The mean of what many continuations earn is the value of a prefix, and reward plus value after less value
before is the **true advantage** of the turn. Every way of estimating it from the episodes alone is then scored.

```
gspo-gym credit Wordle --policy scripted:reference+random
```

does it for one environment (any that `gspo-gym env check` finds the same under the same seed) and one policy, which may
be a model. This page is generated from [credit_bench.jsonl](../credit_bench.jsonl) by `python docs/credit_bench.py`;
`python docs/credit_bench.py measure` plays all games again, `measure quickstart --policy runs/quickstart` one of them
with a model that was trained on it. What follows from it stands in
[GSPO and turn credit](credit.md#when-turn-credit-hurts).

![correlation with the true advantages by game and estimator](../../examples/figures/credit_bench.svg)

Correlation with the true advantage and its 95% interval (whole groups resampled) / slope. The slope is 1 for an
unbiased estimate; it is **bold** where it is more than four standard errors from 1. The ceiling is the most that the
errors of the truth allow.

"""

EXPLANATIONS = """
## What the rows are

- *return*: the episode's, nothing subtracted. *return to go*: from the turn on.
- *trajectory, leave one out*: `advantages.level = "trajectory"`; *turn, leave one out*: `"turn"`; *auto*: `"auto"`,
  which takes of these the one that has the smaller mean square in the batch's other groups.
- *turn, those alive*: compared with those siblings alone that still play.
- *GiGPO as published*: the sum of two advantages, of the episode and of the state
  ([2505.10978](https://arxiv.org/abs/2505.10978)). *state, leave one episode out*: the second without the episode's own
  turns, 0 where no sibling was in that state; *the same, else the turn's*: there the turn's.
- *events, turn*: as *turn*, of the names that a turn reached first (`training.step_rewards_mode =
  "decision_stepwise"`) in the place of rewards.
- *a judge's events, turn* (not in the table): as *turn*, of a judge's score of every turn in the place of rewards.
  `gspo-gym credit ENV --judge CONFIG.toml` asks that configuration's judge. Its scores have a scale of their own:
  read the correlation and the signs.
- *tree*: 1 or 4 continuations of its own before and after each turn, which cost as many more episodes.
- *right signs*: the share of the turns whose true sign is sure (two standard errors) that get it. `*`: the mean of
  estimate less truth is more than four standard errors from 0, which is no bias of a gradient.
"""


AUTO = """
## The level that chooses itself

Correlation with the true advantage of the two levels and of `advantages.level = "auto"`, which takes one of them group
by group: the mean over five sets of eight tasks, each a batch of its own. The difference is to the level that is better
in that game, with a 95% interval over the five sets (resampled; of five values it holds the truth in about 85% of
cases).

"""


def lines(file: Path = LINES) -> list[dict]:
    """Return the measurements; none where there is no file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def name_of(game: dict) -> str:
    """Return the name of a game without its version."""
    return game["environment"].partition("/")[2].partition("-")[0]


def players_of(game: dict) -> str:
    """Return who plays: the scripted players, or the model."""
    kind, _, names = game["policy"].partition(":")
    return names.replace("+", " or ") if kind == "scripted" else f"model {Path(game['policy']).name}"


def page() -> str:
    """Return the text of the page."""
    parts = [INTRODUCTION]
    for heading, games in by_players().items():
        rows = [{row["name"]: row for row in game["rows"]} for game in games]
        names = list(dict.fromkeys(row["name"] for game in games for row in game["rows"]))
        table = [["estimator", *map(name_of, games)], ["---"] * (1 + len(games))]
        table.append(["players", *map(players_of, games)])
        table.append(["groups of 8; turns", *(f"{_num_groups(game)}; {game['num_turns']:,}" for game in games)])
        table.append(["ceiling", *(f"{game['ceiling']:.2f}" for game in games)])
        table += [[name, *(_cell(row.get(name)) for row in rows)] for name in names]
        signs = [["right signs", *map(name_of, games)], ["---"] * (1 + len(games))]
        signs += [[name, *(_signs(row.get(name)) for row in rows)] for name in names]
        parts += [f"## {heading}\n\n", _markdown(table), "\n", _markdown(signs), "\n"]
    minutes = sum(game["seconds"] for game in lines()) / 60
    parts.append(f"All of it took {minutes:.0f} minutes of a core that other programs shared, two games at a time.\n")
    return "".join(parts) + EXPLANATIONS + _auto(lines(AUTO_LINES))


def by_players() -> dict[str, list[dict]]:
    """Return the measurements by who plays, under a heading."""
    games = lines()
    scripted = [game for game in games if game["policy"].startswith("scripted:")]
    trained = [game for game in games if game not in scripted]
    parts = {"Scripted players": scripted, "Players that were trained on the game": trained}
    return {heading: own for heading, own in parts.items() if own}


def _auto(sets: Sequence[dict]) -> str:
    """Return the section of "auto", "" before it was measured."""
    from gspo_gym.rollout.statistics import bootstrap_mean_interval

    table = [["game", *(name.partition(",")[0] for name in LEVELS), "auto less the better of the two", ""], ["---"] * 6]
    for game in dict.fromkeys(map(name_of, sets)):
        rows = [{row["name"]: row["correlation"] for row in one["rows"]} for one in sets if name_of(one) == game]
        means = [fmean(row[name] for row in rows) for name in LEVELS]
        better = LEVELS[means.index(max(means[:2]))]
        differences = [row[LEVELS[2]] - row[better] for row in rows]
        interval = bootstrap_mean_interval(differences)
        ends = f" ({interval.low:+.2f} to {interval.high:+.2f})" if interval else ""
        verdict = "worse" if interval and interval.high < 0 else "not worse beyond its interval"
        table.append([game, *(f"{mean:.2f}" for mean in means), f"{fmean(differences):+.2f}{ends}", verdict])
    return AUTO + _markdown(table) if sets else ""


def _num_groups(game: dict) -> int:
    first, last = map(int, game["seeds"].split(":"))
    return last - first


def _cell(row: dict | None) -> str:
    if row is None:
        return "-"
    slope = f"**{row['slope']:.2f}**" if row["is_biased"] else f"{row['slope']:.2f}"
    return f"{row['correlation']:.2f} ({row['low']:.2f} to {row['high']:.2f}) / {slope}"


def _signs(row: dict | None) -> str:
    return "-" if row is None else f"{row['right_signs']:.2f}{' *' if row['is_shifted'] else ''}"


def _markdown(table: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" if row[0] != "---" else f"|{'|'.join(row)}|\n" for row in table)


def figure(file: Path) -> None:
    """Draw a panel for each game: estimators from top to bottom, correlation with its interval, and the ceiling."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "gspo_gym"  # the same numbers give the same file
    from matplotlib import pyplot as plt

    groups = list(by_players().values())
    names = list(dict.fromkeys(row["name"] for games in groups for game in games for row in game["rows"]))
    width = max(map(len, groups))
    drawing, panels = plt.subplots(
        len(groups),
        width,
        figsize=(2.2 + 1.6 * width, 3.4 * len(groups)),
        squeeze=False,
        sharey=True,
        sharex=True,
        layout="constrained",
    )
    for row_of_panels, games in zip(panels, groups, strict=True):
        for axes in row_of_panels[len(games) :]:
            axes.set_visible(False)
        for axes, game in zip(row_of_panels, games, strict=False):
            for row in game["rows"]:
                place, middle = len(names) - names.index(row["name"]), row["correlation"]
                color = "tab:red" if row["is_biased"] else "tab:blue"
                axes.plot([row["low"], row["high"]], [place, place], color=color, linewidth=1.2)
                axes.plot([middle], [place], "o", color=color, markersize=3.5)
            axes.axvline(game["ceiling"], color="gray", linestyle=":", linewidth=1)
            is_model = not game["policy"].startswith("scripted:")
            axes.set_title(f"{name_of(game)}, trained" if is_model else name_of(game), fontsize=9)
            axes.grid(axis="x", linewidth=0.3)
    for axes in panels[:, 0]:
        axes.set_yticks(range(len(names), 0, -1), names, fontsize=8)
    drawing.supxlabel("correlation with the true advantage (dotted: ceiling; red: slope not 1)", fontsize=9)
    drawing.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def _rollout(name: str) -> dict:
    return tomllib.loads((ROOT / "configs" / f"{name}.toml").read_text(encoding="utf-8"))["rollout"]


def play(name: str, policy: str, seeds: str) -> str:
    """Play a game at the level of its configuration, in a process, and return its line."""
    rollout = _rollout(name)
    options = [f"--option={key}={json.dumps(value)}" for key, value in rollout["env_config"].items()]
    limits = [f"--max-turns={rollout['max_turns']}", f"--max-tokens={rollout['max_output_tokens']}", "--concurrent=192"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "game.json"
        words = ["credit", rollout["env_name"], *options, f"--policy={policy}", f"--seeds={seeds}", f"--json={file}"]
        subprocess.run([sys.executable, "-m", "gspo_gym.cli", *words, *limits], check=True, cwd=ROOT)
        return file.read_text(encoding="utf-8")


def measure(names: Sequence[str], policy: str | None) -> None:
    """Play games, and keep their lines beside those of other games and policies."""
    if policy is None:
        jobs = [(name, GAMES[name][0], f"0:{GAMES[name][1]}") for name in names or BENCH]
    else:
        jobs = [(name, policy, f"0:{NUM_MODEL_TASKS}") for name in names]
    _keep(LINES, jobs)


def measure_auto(names: Sequence[str]) -> None:
    """Play all sets of tasks of games, which no two sets share."""
    starts = range(0, NUM_SETS * SET_SIZE, SET_SIZE)
    jobs = [(name, GAMES[name][0], f"{start}:{start + SET_SIZE}") for name in names or GAMES for start in starts]
    _keep(AUTO_LINES, jobs, LEVELS)


def _keep(file: Path, jobs: Sequence[tuple[str, str, str]], estimators: Sequence[str] = ()) -> None:
    """Write the line of each job as soon as it is known, in the place of an earlier one of the same."""
    with ThreadPoolExecutor(2) as pool:
        for text in pool.map(lambda job: play(*job), jobs):
            line = json.loads(text)
            if estimators:
                line["rows"] = [row for row in line["rows"] if row["name"] in estimators]
            keys = ("environment", "policy", "seeds") if estimators else ("environment", "policy")
            others = [other for other in lines(file) if any(other[key] != line[key] for key in keys)]
            texts = [json.dumps(entry) + "\n" for entry in sorted([*others, line], key=_order)]
            file.write_text("".join(texts), encoding="utf-8")


def _order(line: dict) -> tuple[bool, int, int]:
    names = [_rollout(name)["env_name"] for name in GAMES]
    is_model, first = not line["policy"].startswith("scripted:"), int(line["seeds"].partition(":")[0])
    return is_model, names.index(name_of(line)), first


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Write the page of CreditBench.")
    parser.add_argument("what", nargs="?", choices=["measure", "auto"], help="measure first")
    parser.add_argument("names", nargs="*", metavar="GAME", help=f"{', '.join(GAMES)} (all)")
    parser.add_argument("--policy", metavar="MODEL", help="measure: who plays the named games")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in GAMES]:
        parser.error(f"there is no game {unknown[0]!r}: expected {', '.join(GAMES)}")
    if options.policy and not (options.names and options.what == "measure"):
        parser.error("--policy: name the games that it plays, such as measure quickstart --policy runs/quickstart")
    if options.what == "measure":
        measure(options.names, options.policy)
    elif options.what == "auto":
        measure_auto(options.names)
    PAGE.write_text(page(), encoding="utf-8")
    figure(FIGURE)


if __name__ == "__main__":
    main()
