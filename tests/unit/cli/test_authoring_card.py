"""An environment's card: what it says itself, and how its players do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from gspo_gym.cli.authoring import PlayerRecord, card_as_markdown, histogram, make_card
from gspo_gym.cli.main import main
from gspo_gym.env.core import TextEnv
from gspo_gym.env.playing import Playthrough
from gspo_gym.env.registry import register
from gspo_gym.env.rewards import Reward
from gspo_gym.errors import ConfigError, UnknownNameError
from gspo_gym.types import StepResult


class Parity(TextEnv):
    """Say whether the seed is even.

    The second paragraph is not in the card.
    """

    policies = {"reference": lambda env, rng: lambda messages: env.answer, "random": lambda env, rng: lambda _: "even"}
    reward_range = (-1.0, 1.0)

    def __init__(self, *, fails_from: int = 1_000, unit: float = 1.0) -> None:
        self.fails_from, self.unit = fails_from, unit

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if (seed or 0) >= self.fails_from:
            raise OSError("no more")
        self.answer = ("even", "odd")[(seed or 0) % 2]
        return f"| {seed}\n```\n", {}

    def step(self, action: str) -> Any:
        is_right = action == self.answer
        events = ("right",) if is_right else ()
        reward = Reward({"right": self.unit * is_right, "cost": -0.25}, events=events, success=is_right)
        return "done", reward, True, False, {}


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register("test_card/Parity-v0", entry_point=Parity, max_episode_steps=7)
    yield
    gymnasium.registry.pop("test_card/Parity-v0")


def test_records_are_what_the_episodes_add_up_to() -> None:
    card = make_card("test_card/Parity-v0", num_seeds=10)
    reference, chance = card.records
    assert (reference.player, chance.player) == ("reference", "random")
    assert reference.returns == (0.75,) * 10
    # the seeds 0, 2, 4, 6, 8 are even
    assert chance.returns == (0.75, -0.25) * 5
    assert (reference.success_rate, chance.success_rate) == (1.0, 0.5)
    assert chance.mean_terms == {"right": 0.5, "cost": -0.25}
    assert (reference.event_rates, chance.event_rates) == ({"right": 1.0}, {"right": 0.5})
    assert chance.turns == (1,) * 10
    # Wilson's interval for 5 of 10, z = 1.96: centre 0.5, half width z sqrt(1/40 + z^2/400) / (1 + z^2/10) = 0.2634
    assert chance.success_interval is not None
    assert (chance.success_interval.low, chance.success_interval.high) == pytest.approx((0.2366, 0.7634), abs=1e-4)


def test_an_undecided_episode_is_no_success_of_a_player() -> None:
    def played(success: bool | None) -> Playthrough:
        return Playthrough(0, (), (), (StepResult((), reward=1.0, success=success, terminated=True),))

    record = PlayerRecord("random", tuple(played(success) for success in (True, None, None, None)), ())
    assert record.success_rate == 0.25
    assert PlayerRecord("random", (played(None),), ()).success_rate is None


def test_the_card_has_everything_that_an_environment_says_of_itself() -> None:
    text = card_as_markdown(make_card("test_card/Parity-v0", {"unit": 0.5}, num_seeds=4))
    lines = {" ".join(line.split()) for line in text.splitlines()}
    assert text.startswith("# test_card/Parity-v0\n\nSay whether the seed is even.\n\n|")
    assert "second paragraph" not in text
    assert {
        "| acts by | text |",
        "| time limit | 7 steps, then truncated |",
        "| `fails_from` | `1000` |",
        "| `unit` | `0.5` |",
        "Return of an episode: declared from -1 to 1; between -0.25 and 0.25 over these episodes.",
        "| `right` | 0.5 | 0.25 |",  # term: 0.5 a time, half of the time for the random player
        "| `right` | 1 | 0.5 |",  # event
        "## Transcript: reference, seed 0",
        "return 0.25, 1 turn.",
    } <= lines


def test_a_fence_in_what_is_said_does_not_end_the_transcript() -> None:
    transcript = card_as_markdown(make_card("test_card/Parity-v0", num_seeds=1)).partition("## Transcript")[2]
    assert transcript.count("````text\nuser       | 0\n           ```\n") == 1
    assert transcript.count("\n````\n") == 1


def test_tools_are_listed_with_their_parameters() -> None:
    text = card_as_markdown(make_card("SqlAnalyst", {"level": "tiny"}, num_seeds=2))
    assert "- `query(sql: string)`: Run a SELECT." in text
    assert "assistant  answer({" in text


def test_episodes_that_fail_are_counted_and_are_no_returns() -> None:
    card = make_card("test_card/Parity-v0", {"fails_from": 3}, num_seeds=5)
    assert [len(record.runs) for record in card.records] == [3, 3]
    assert [len(record.failures) for record in card.records] == [2, 2]
    assert "2 episodes of random failed; seed 3: EnvError: " in card_as_markdown(card)
    nothing = card_as_markdown(make_card("test_card/Parity-v0", {"fails_from": 0}, num_seeds=2))
    assert "none: only a judge can score it" in nothing


def test_without_a_random_player_arbitrary_actions_are_played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Parity, "policies", {})
    (record,) = make_card("test_card/Parity-v0", num_seeds=3).records
    assert record.player == "arbitrary actions"


def test_the_command_writes_markdown_and_tells_failed_episodes_by_its_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "deep" / "CARD.md"
    command = ["env", "card", "test_card/Parity-v0", "--seeds", "3"]
    assert main([*command, "--option", "unit=0.5", "--markdown", str(file)]) == 0
    assert "| `unit`       | `0.5`  |" in file.read_text()
    assert main([*command, "--option", "fails_from=2"]) == 1
    assert "# test_card/Parity-v0" in capsys.readouterr().out


def test_what_cannot_be_described_is_said() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'GuessNumber'"):
        make_card("GuesNumber")
    with pytest.raises(ConfigError, match="takes no argument 'hihg'"):
        make_card("GuessNumber", {"hihg": 3})
    with pytest.raises(ConfigError, match="expected at least one seed, got 0"):
        make_card("GuessNumber", num_seeds=0)


def test_many_values_are_counted_by_tenths_of_their_range() -> None:
    lines = histogram([float(value) for value in range(100)]).splitlines()
    # from 0 to 99 in tenths of 9.9: ten values in each
    assert [line.split()[-2:] for line in lines] == [["10", "#" * 40]] * 10
