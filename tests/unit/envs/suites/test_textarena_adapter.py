"""The TextArena adapter over a stand-in of the package (`fake_textarena`): seats, seeds, rewards, opponents, failures.

The real games are played by tests/foreign.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Generator, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from gspo_gym_envs.suites import textarena
from gspo_gym_envs.suites.textarena import TextArenaEnv
from gymnasium.error import ResetNeeded

from gspo_gym.env.checks.checker import check_env
from gspo_gym.errors import ConfigError, ContractError, EnvError, MissingExtraError, UnknownNameError
from gspo_gym.types import Message


@pytest.fixture(autouse=True)
def fake_textarena(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "fake_textarena"))
    known = {name: sys.modules.pop(name, None) for name in ("textarena", "nltk")}
    textarena.fewest_players.cache_clear()
    yield
    textarena.fewest_players.cache_clear()
    for name, module in known.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


def number_of(seed: int) -> int:
    return random.Random(seed).randint(0, 99)  # what a game seeded with it draws first


def always(move: str, heard: list[str] | None = None) -> Any:
    def player(messages: Sequence[Message]) -> str:
        if heard is not None:
            heard.append(messages[-1].content)
        return move

    return player


def test_a_seed_means_the_game_that_textarena_plays_with_it() -> None:
    env = TextArenaEnv(game="Guess-v0")
    assert env.reset(seed=11) == ("Guess a number, such as [5].", {"seat": 0, "num_players": 1})
    observation, reward, terminated, truncated, info = env.step(f"[{number_of(11)}]")
    assert (observation, float(reward), reward.terms, reward.success) == ("Right.", 1.0, {"outcome": 1.0}, True)
    assert (terminated, truncated, info["rewards"], info["reason"]) == (True, False, {0: 1.0}, "Right.")


def test_the_process_s_generators_are_as_they_were_and_others_do_not_disturb_a_seed() -> None:
    random.seed(5)
    before = random.getstate()
    env = TextArenaEnv(game="Guess-v0")
    env.reset(seed=11)
    assert random.getstate() == before
    other = TextArenaEnv(game="Guess-v0")
    other.reset(seed=12)
    random.random()
    assert env.step(f"[{number_of(11)}]")[1] == 1.0


def test_a_turn_that_does_not_end_the_game_is_not_scored_and_shows_only_what_is_new() -> None:
    env = TextArenaEnv(game="Guess-v0")
    env.reset(seed=11)
    hint = "It is lower." if number_of(11) < 99 else "It is higher."
    assert env.step("[99]") == (hint, None, False, False, {})


def test_the_game_says_what_an_invalid_move_costs() -> None:
    env = TextArenaEnv(game="Guess-v0")
    env.reset(seed=0)
    assert env.step("five")[:2] == ("Invalid move.", None)
    observation, reward, terminated, _, info = env.invalid_action("unreadable: no closing tag")
    assert observation.startswith("unreadable: no closing tag\nInvalid move.")
    assert (float(reward), reward.success, terminated, info["invalid_move"]) == (-1.0, False, True, True)


def test_a_game_is_read_in_its_raw_form_by_either_name_and_in_no_other() -> None:
    assert TextArenaEnv(game="Guess-v0-raw").game == TextArenaEnv(game="Guess-v0").game == "Guess-v0"
    with pytest.raises(ConfigError, match="use 'Guess-v0'"):
        TextArenaEnv(game="Guess-v0-train")
    with pytest.raises(UnknownNameError, match="did you mean 'Guess-v0'"):
        TextArenaEnv(game="Gues-v0")


def test_the_fewest_players_are_taken_and_a_wrong_number_is_refused() -> None:
    assert TextArenaEnv(game="Guess-v0").num_players == 1
    assert TextArenaEnv(game="Race-v0").num_players == 2
    assert TextArenaEnv(game="Race-v0", num_players=3).num_players == 3
    with pytest.raises(EnvError, match="reset with 4 players raised AssertionError"):
        TextArenaEnv(game="Race-v0", num_players=4)
    with pytest.raises(ConfigError, match="seat 'random' or 0 to 1, got 2"):
        TextArenaEnv(game="Race-v0", seat=2)


def test_what_is_said_names_its_speaker_and_own_words_are_not_repeated() -> None:
    env = TextArenaEnv(game="Race-v0", opponent=always("[3]"))
    opening = env.reset(seed=0)[0]
    assert opening == "[GAME] You are Player 0. Your secret is 000. Available Moves: '[1]', '[2]', '[3]'"
    moves = "Available Moves: '[1]', '[2]', '[3]'"
    assert env.step("[2]")[0] == f"[GAME] Total 2. {moves}\n[Player 1] [3]\n[GAME] Total 5. {moves}"


def test_an_opponent_is_shown_its_own_seat_and_nothing_of_the_model_s() -> None:
    heard: list[str] = []
    env = TextArenaEnv(game="Race-v0", opponent=always("[1]", heard))
    env.reset(seed=0)
    env.step("[3] because I think of 000")
    assert "Your secret is 111" in heard[0]
    assert "Your secret is 000" not in heard[0]
    assert "[Player 0] [3] because" in heard[0]


def test_a_model_at_a_later_seat_moves_after_the_others() -> None:
    env = TextArenaEnv(game="Race-v0", num_players=3, seat=1, opponent=always("[3]"))
    assert "Total 3." in env.reset(seed=0)[0]
    # 3 + 1, then players 2 and 0 make it 7 and 10: player 0 has won, and player 1 has lost.
    _, reward, terminated, _, info = env.step("[1]")
    assert (float(reward), reward.success, terminated) == (-1.0, False, True)
    assert info["rewards"] == {0: 1.0, 1: -1.0, 2: -1.0}


def test_a_seat_that_is_drawn_follows_from_the_seed_and_takes_both_values() -> None:
    env = TextArenaEnv(game="Race-v0", seat="random", opponent=always("[1]"))
    drawn = [env.reset(seed=seed)[1]["seat"] for seed in range(20)]
    assert set(drawn) == {0, 1}
    assert drawn == [env.reset(seed=seed)[1]["seat"] for seed in range(20)]


def test_the_random_opponent_makes_legal_moves_that_follow_from_the_seed() -> None:
    def game(seed: int) -> list[str]:
        env = TextArenaEnv(game="Race-v0")
        said = [env.reset(seed=seed)[0]]
        while True:
            observation, _, terminated, _, _ = env.step("[1]")
            said.append(observation)
            if terminated:
                return said

    games = [game(seed) for seed in range(8)]
    assert games == [game(seed) for seed in range(8)]
    assert len({tuple(said) for said in games}) > 1


def test_an_async_opponent_is_awaited_and_a_plain_one_must_not_answer_later() -> None:
    async def later(messages: Sequence[Message]) -> str:
        await asyncio.sleep(0)
        return "[3]"

    async def play() -> str:
        env = TextArenaEnv(game="Race-v0", opponent=later)
        await env.reset(seed=0)
        return (await env.step("[1]"))[0]

    assert "[Player 1] [3]" in asyncio.run(play())

    class Promise:
        def __await__(self) -> Generator[None, None, str]:
            yield
            return "[1]"

    env = TextArenaEnv(game="Race-v0", opponent=lambda messages: Promise())
    env.reset(seed=0)
    with pytest.raises(ContractError, match="define it with async def"):
        env.step("[1]")


class _Endpoint(BaseHTTPRequestHandler):
    """An OpenAI-compatible endpoint that always says "[2]" and keeps what it was asked."""

    asked: list[dict[str, Any]]

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        message = {"role": "assistant", "content": "[2]"}
        choices = [{"index": 0, "finish_reason": "stop", "message": message}]
        body = json.dumps({"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": choices})
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_model_behind_an_endpoint_plays_the_other_seat() -> None:
    handler = type("Endpoint", (_Endpoint,), {"asked": []})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        settings = {"model": "m", "base_url": f"http://127.0.0.1:{server.server_port}/v1", "temperature": 0.5}

        async def play() -> str:
            env = TextArenaEnv(game="Race-v0", opponent=settings)
            await env.reset(seed=0)
            observation = (await env.step("[1]"))[0]
            await env.close()
            return observation

        observation = asyncio.run(play())
        server.shutdown()
        thread.join()
    assert "[Player 1] [2]" in observation
    [request] = handler.asked
    assert request["temperature"] == 0.5
    assert "Your secret is 111" in request["messages"][0]["content"]


def test_settings_of_an_opponent_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'modle'; did you mean 'model'"):
        TextArenaEnv(game="Race-v0", opponent={"modle": "m"})
    with pytest.raises(ConfigError, match="expected the setting 'model'"):
        TextArenaEnv(game="Race-v0", opponent={"base_url": "http://127.0.0.1"})
    with pytest.raises(ConfigError, match="unknown opponent 'randm'; did you mean 'random'"):
        TextArenaEnv(game="Race-v0", opponent="randm")
    with pytest.raises(ConfigError, match="nobody has written a player of Race-v0"):
        TextArenaEnv(game="Race-v0", opponent="scripted")


def test_self_play_names_the_seat_says_nothing_twice_and_scores_every_seat() -> None:
    env = TextArenaEnv(game="Race-v0", opponent="self")
    assert env.reset(seed=0)[0].endswith("\nYou are Player 0 now.")
    first = env.step("[3]")[0]
    assert first.endswith("\nYou are Player 1 now.")
    assert "Your secret is 111" in first
    second = env.step("[3]")[0]
    assert second == "[Player 1] [3]\n[GAME] Total 6. Available Moves: '[1]', '[2]', '[3]'\nYou are Player 0 now."
    env.step("[3]")
    _, reward, terminated, _, _ = env.step("[1]")  # 3 + 3 + 3 + 1: player 1 has won
    assert terminated
    assert (reward.terms, reward.success, float(reward)) == ({"seat 0": -1.0, "seat 1": 1.0}, None, 0.0)


def test_a_game_that_gives_no_reward_is_not_scored() -> None:
    env = TextArenaEnv(game="Unscored-v0")
    env.reset(seed=0)
    observation, reward, terminated, _, _ = env.step("[1]")
    assert (observation, reward, terminated) == ("Nobody counts.", None, True)


def test_a_failure_of_the_game_is_an_error_and_no_reward() -> None:
    for game, error, text in (
        ("Crashing-v0", EnvError, "Crashing-v0: step raised ZeroDivisionError: division by zero"),
        ("Swapped-v0", ContractError, "expected a finite reward of player 0"),
        ("Endless-v0", EnvError, "1000 turns of the others"),
    ):
        env = TextArenaEnv(game=game)
        env.reset(seed=0)
        with pytest.raises(error, match=text):
            env.step("[1]")


def test_arguments_in_the_wrong_order_are_still_an_echo() -> None:
    env = TextArenaEnv(game="Disordered-v0")
    env.reset(seed=11)
    assert env.step("[99]")[0] == "It is lower."


def test_words_that_would_have_to_be_downloaded_are_an_error_and_nothing_is_downloaded() -> None:
    with pytest.raises(ConfigError, match=r"python -m nltk\.downloader words"):
        TextArenaEnv(game="Words-v0")
    nltk = sys.modules["nltk"]
    assert nltk.asked_for == []
    nltk.download("afterwards")  # it is itself again
    assert nltk.asked_for == ["afterwards"]


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'gspo-gym\[envs-textarena\]'"):
        TextArenaEnv(game="Guess-v0")


def test_a_step_without_a_game_is_refused() -> None:
    env = TextArenaEnv(game="Guess-v0")
    with pytest.raises(ResetNeeded):
        env.step("[1]")
    env.reset(seed=11)
    env.step(f"[{number_of(11)}]")
    with pytest.raises(ResetNeeded):
        env.step("[1]")
    with pytest.raises(ConfigError, match="expected no options"):
        env.reset(seed=0, options={"level": 1})


class InThisProcess(TextArenaEnv):
    isolation = "thread"  # worker processes do not have the stand-in


def test_the_contract_is_kept() -> None:
    report = check_env(lambda: InThisProcess(game="Guess-v0"), seeds=range(3), max_turns=12, num_leak_episodes=0)
    assert report.passed, str(report)
