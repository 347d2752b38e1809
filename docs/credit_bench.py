"""The page and the figure of CreditBench, from docs/credit_bench.jsonl: `python docs/credit_bench.py` writes both.

A line of the file is one game, as `gspo-gym credit --json` writes it. `python docs/credit_bench.py measure` plays all
games again, one after the other, and writes the lines. A test fails while the page is not what the lines say.
"""

import json
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
LINES = HERE / "credit_bench.jsonl"
PAGE = HERE / "explanations" / "credit_bench.md"
FIGURE = ROOT / "examples" / "figures" / "credit_bench.svg"

# Each game at the small level of its configuration: (configuration, policy, tasks).
GAMES = (
    ("quickstart", "scripted:reference+random", "0:60"),
    ("tic_tac_toe", "scripted:reference+random", "0:60"),
    ("frozen_lake", "scripted:reference+random", "0:40"),
    ("countdown", "scripted:reference+random", "0:40"),
    ("wordle", "scripted:reference+random", "0:40"),
    ("homestead", "scripted:random", "0:24"),
)

INTRODUCTION = """# Which credit is right

CreditBench forks episodes at every turn: it plays the recorded actions again under the same seed and goes on with
fresh draws. The mean of what many continuations earn is the value of a prefix, and reward plus value after less value
before is the **true advantage** of the turn. Every way of estimating it from the episodes alone is then scored.

```
gspo-gym credit Wordle --policy scripted:reference+random
```

does it for one environment (any that `gspo-gym env check` finds the same under the same seed) and one policy, which may
be a model. This page is generated from [credit_bench.jsonl](../credit_bench.jsonl) by `python docs/credit_bench.py`;
`python docs/credit_bench.py measure` plays all games again. What follows from it stands in
[GSPO and turn credit](credit.md#when-turn-credit-hurts).

![correlation with the true advantages by game and estimator](../../examples/figures/credit_bench.svg)

Correlation with the true advantage and its 95% interval (whole groups resampled) / slope. The slope is 1 for an
unbiased estimate; it is **bold** where it is more than four standard errors from 1. The ceiling is the most that the
errors of the truth allow.

"""

EXPLANATIONS = """
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

Share of the turns whose true sign is sure (two standard errors) that get the right sign. `*`: the mean of estimate less
truth is more than four standard errors from 0, which is no bias of a gradient.

"""


def lines() -> list[dict]:
    """Return the measurements."""
    return [json.loads(line) for line in LINES.read_text(encoding="utf-8").splitlines()]


def name_of(game: dict) -> str:
    """Return the name of a game without its version."""
    return game["environment"].partition("/")[2].partition("-")[0]


def page() -> str:
    """Return the text of the page."""
    games = lines()
    names = list(dict.fromkeys(row["name"] for game in games for row in game["rows"]))
    rows = [{row["name"]: row for row in game["rows"]} for game in games]
    table = [["estimator", *map(name_of, games)], ["---"] * (1 + len(games))]
    table.append(["players", *(game["policy"].removeprefix("scripted:").replace("+", " or ") for game in games)])
    table.append(["groups of 8; turns", *(f"{_num_groups(game)}; {game['num_turns']:,}" for game in games)])
    table.append(["ceiling", *(f"{game['ceiling']:.2f}" for game in games)])
    table += [[name, *(_cell(row.get(name)) for row in rows)] for name in names]
    signs = [["estimator", *map(name_of, games)], ["---"] * (1 + len(games))]
    signs += [[name, *(_signs(row.get(name)) for row in rows)] for name in names]
    seconds = sum(game["seconds"] for game in games)
    end = f"\nAll games together took {seconds / 60:.0f} minutes on one core, which other programs shared.\n"
    return INTRODUCTION + _markdown(table) + EXPLANATIONS + _markdown(signs) + end


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

    games = lines()
    names = list(dict.fromkeys(row["name"] for game in games for row in game["rows"]))
    drawing, panels = plt.subplots(
        1,
        len(games),
        figsize=(2.2 + 1.6 * len(games), 3.6),
        squeeze=False,
        sharey=True,
        sharex=True,
        layout="constrained",
    )
    for axes, game in zip(panels[0], games, strict=True):
        for row in game["rows"]:
            place, middle = len(names) - names.index(row["name"]), row["correlation"]
            color = "tab:red" if row["is_biased"] else "tab:blue"
            axes.plot([row["low"], row["high"]], [place, place], color=color, linewidth=1.2)
            axes.plot([middle], [place], "o", color=color, markersize=3.5)
        axes.axvline(game["ceiling"], color="gray", linestyle=":", linewidth=1)
        axes.set_title(name_of(game), fontsize=9)
        axes.grid(axis="x", linewidth=0.3)
    panels[0, 0].set_yticks(range(len(names), 0, -1), names, fontsize=8)
    drawing.supxlabel("correlation with the true advantage (dotted: ceiling; red: slope not 1)", fontsize=9)
    drawing.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def measure() -> None:
    """Play all games and keep their lines."""
    from gspo_gym.cli.main import main

    texts = []
    for name, policy, seeds in GAMES:
        rollout = tomllib.loads((ROOT / "configs" / f"{name}.toml").read_text(encoding="utf-8"))["rollout"]
        options = [f"--option={key}={json.dumps(value)}" for key, value in rollout["env_config"].items()]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "game.json"
            words = ["credit", rollout["env_name"], *options, "--policy", policy, "--seeds", seeds]
            if main([*words, "--max-turns", str(rollout["max_turns"]), "--json", str(file)]) != 0:
                raise SystemExit(f"{name} could not be measured")
            texts.append(file.read_text(encoding="utf-8"))
        LINES.write_text("".join(texts), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        measure()
    PAGE.write_text(page(), encoding="utf-8")
    figure(FIGURE)
