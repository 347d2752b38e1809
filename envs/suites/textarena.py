"""`TextArenaEnv`: games of the package `textarena`, in which the model plays one seat, or all of them.

The game decides on legal moves, the end and the rewards. The other seats are played inside `reset` and `step`:
at random, by a hand-written player, by a model behind an endpoint, or by a function.

A match uses the game's "-raw" form, whose observations are lists of (speaker, text, kind); the other forms repeat the
history every turn. Reading an observation empties it, so each player's is read once.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import numbers
import re
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, reduce
from operator import xor
from typing import Any, Literal

import numpy as np
from gspo_gym_envs.suites.packages import import_package
from gspo_gym_envs.suites.reasoning_gym import OwnGenerators
from gymnasium.error import ResetNeeded

from gspo_gym.env.chat_model import ChatModel, ChatModelSettings
from gspo_gym.env.core import Info, PolicyFactory, ScriptedPolicy, TextEnv, driven
from gspo_gym.env.data.rows import next_seed
from gspo_gym.env.rewards import Reward
from gspo_gym.errors import ConfigError, ContractError, EnvError, UnknownNameError, nearest_name
from gspo_gym.seeding import child_seed, generator
from gspo_gym.types import Message, is_finite

# Player of one seat, shown that seat's conversation. One function serves the seats of all opponents.
Opponent = Callable[[Sequence[Message]], Message | str | Awaitable[Message | str]]

_MAX_TURNS_OF_OTHERS = 1_000  # between two turns of the model; more mean a game that does not progress
_NOTHING_NEW = "It is your turn."


class TextArenaEnv(TextEnv):
    """One game of TextArena. Needs `pip install 'gspo-gym[envs-textarena]'`.

    Observations are what the game tells the player, each piece once; with several players each piece names its speaker
    in brackets. An action is the model's unchanged text: games read the first thing in square brackets, or all of it.

    The game scores only its end, so earlier turns are not scored (None, not 0), and an episode that a limit cuts off
    has no result. The reward is the game's for this player, unchanged, as the term "outcome": usually 1 for a win or a
    solved puzzle, -1 for a loss, 0 for a draw, a fraction for a puzzle solved in part. `success` is a reward above 0
    against others, of at least 1 alone. All ends are *terminated*, because turn limits are rules of the games. The game
    answers an invalid move; it allows one, and ends with the second in a row.

    With opponent "self", one conversation plays every seat in turn and holds all that any of them is told, which suits
    games without secrets. The end has a term for each seat, such as "seat 1", and no success; in a zero-sum game the
    terms add up to 0. To train against the current policy, pass a function that asks it.

    Args:
        game: such as "TicTacToe-v0", with or without "-raw"; other forms are refused.
        num_players: None takes the fewest that the game allows.
        seat: the model's, from 0; "random" draws it from the seed.
        opponent: "random" (moves that the game lists as legal, if any); "scripted" (for a few games); "self"; the
            settings of a `ChatModel` by name, such as {"model": ..., "base_url": ...}; or a function, plain or async,
            from one seat's conversation to its answer. A function cannot be sent to a worker process, so it needs
            isolation "thread".

    Raises:
        MissingExtraError: textarena is not installed.
        UnknownNameError: there is no such game.
        ConfigError: the game needs something missing on this machine, or an argument does not fit it.
    """

    # Games draw from process-wide generators, and some loop for ever.
    isolation = "process"
    reward_range = (-1.0, float("inf"))  # a loss, or an illegal move; what a game pays at most differs

    def __init__(
        self,
        *,
        game: str,
        num_players: int | None = None,
        seat: int | Literal["random"] = 0,
        opponent: str | Mapping[str, Any] | Opponent = "random",
    ) -> None:
        self.game = game.removesuffix("-raw")
        if self.game.endswith("-train"):
            plain = self.game.removesuffix("-train")
            raise ConfigError(f"TextArena: {game!r} repeats the history every turn; use {plain!r}")
        fewest = fewest_players(self.game)
        self.num_players = fewest if num_players is None else num_players
        if seat != "random" and seat not in range(self.num_players):
            raise ConfigError(f"TextArena: expected seat 'random' or 0 to {self.num_players - 1}, got {seat!r}")
        if self.num_players != fewest:
            Match(self.game, self.num_players, 0)  # refuse a wrong number now, not in every episode
        self._seat_setting = seat
        self._plays_all = opponent == "self" and self.num_players > 1
        self._chat_model: ChatModel | None = None
        self._opponent: Callable[[int, int], Opponent] = self._opponents(opponent)
        self._is_async = self._chat_model is not None or _is_async(opponent)
        self.seat = 0
        self._match: Match | None = None
        self._others: dict[int, Opponent] = {}
        self._conversations: dict[int, list[Message]] = {}
        self._told_to_others: dict[int, list[Said]] = {}
        scripted = scripted_player(self.game)
        self.policies = _policies(scripted, is_sure=self.num_players == 1)  # type: ignore[misc]  # they are the game's

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Any:
        """Start a game and play it up to the model's first turn: (observation, info), or an awaitable of it."""
        super().reset(seed=seed)
        if options:
            raise ConfigError(f"TextArena.reset: expected no options, got {sorted(options)}")
        if seed is None:
            seed = next_seed(self.np_random)
        self._match = Match(self.game, self.num_players, seed)
        drawn = int(generator(seed, "seat").integers(self.num_players))
        self.seat = drawn if self._seat_setting == "random" else self._seat_setting
        seats = [other for other in range(self.num_players) if other != self.seat and not self._plays_all]
        self._others = {other: self._opponent(other, child_seed(seed, "opponent", other)) for other in seats}
        self._conversations = {other: [] for other in seats}
        self._told_to_others = {each: [] for each in range(self.num_players)}
        return driven(self._opening(), is_async=self._is_async)

    def step(self, action: str) -> Any:
        """Play the model's turn and the others' up to its next: Gymnasium's 5-tuple, or an awaitable of it."""
        return driven(self._turn(action), is_async=self._is_async)

    def invalid_action(self, error: str) -> Any:
        """Play a turn in which nothing was said; the game decides its cost."""
        return driven(self._turn("", error), is_async=self._is_async)

    def close(self) -> Any:
        # With a model behind an endpoint, an awaitable that closes its connections.
        self._match = None
        return None if self._chat_model is None else self._chat_model.close()

    async def _opening(self) -> tuple[str, Info]:
        match = self._running("reset")
        await self._let_others_play(match)
        return self._observation(match), {"seat": self.seat, "num_players": self.num_players}

    async def _turn(self, action: str, error: str = "") -> tuple[str, Reward | None, bool, bool, Info]:
        match = self._running("step")
        if not match.is_over:  # the others may have lost before the model's first turn
            match.say(action)
            await self._let_others_play(match)
        observation = self._observation(match)
        observation = f"{error}\n{observation}" if error else observation
        if not match.is_over:
            return observation, None, False, False, {}
        self._match = None
        return self._end(match, observation)

    def _end(self, match: Match, observation: str) -> tuple[str, Reward | None, bool, bool, Info]:
        result = match.result()
        report = result.reports.get(self.seat, {})
        if report.get("reason"):
            observation = f"{observation}\n{report['reason']}".lstrip("\n")
        info = {"rewards": dict(result.rewards), **report}
        if not result.rewards:  # some games end without a result
            return observation, None, True, False, info
        if self._plays_all:
            terms = {f"seat {seat}": result.rewards[seat] for seat in sorted(result.rewards) if seat >= 0}
            return observation, Reward(terms), True, False, info
        if self.seat not in result.rewards:
            raise ContractError(f"{self.game}: expected a reward of player {self.seat}, got {dict(result.rewards)}")
        reward = result.rewards[self.seat]
        success = reward >= 1 if self.num_players == 1 else reward > 0
        return observation, Reward({"outcome": reward}, success=success), True, False, info

    async def _let_others_play(self, match: Match) -> None:
        for _ in range(_MAX_TURNS_OF_OTHERS):
            if match.is_over or self._plays_all or match.seat_to_move == self.seat:
                return
            seat = match.seat_to_move
            conversation = self._conversations[seat]
            conversation.append(Message("user", as_text(match.news(seat), with_speakers=True) or _NOTHING_NEW))
            said = self._others[seat](tuple(conversation))
            if inspect.isawaitable(said):
                if not self._is_async:
                    raise ContractError(f"{self.game}: the opponent answers later; define it with async def")
                said = await said
            conversation.append(Message("assistant", said) if isinstance(said, str) else said)
            match.say(conversation[-1].content)
        raise EnvError(f"{self.game}: {_MAX_TURNS_OF_OTHERS} turns of the others, and not one of the model's")

    def _observation(self, match: Match) -> str:
        is_multi = self.num_players > 1
        if not self._plays_all:
            text = as_text(match.news(self.seat), with_speakers=is_multi)
            return text or ("" if match.is_over else _NOTHING_NEW)
        self.seat = self.seat if match.is_over else match.seat_to_move
        news = match.news(self.seat)
        for entry in self._told_to_others[self.seat]:  # the conversation holds what was told to every seat already
            if entry in news:
                news.remove(entry)
        self._told_to_others[self.seat] = []
        for seat, told in self._told_to_others.items():
            if seat != self.seat:
                told.extend(news)
        text = as_text(news, with_speakers=True)
        return text if match.is_over else f"{text}\nYou are Player {self.seat} now.".lstrip("\n")

    def _running(self, method: str) -> Match:
        if self._match is None:
            raise ResetNeeded(f"TextArena.{method}: no game is being played; call reset first")
        return self._match

    def _opponents(self, opponent: str | Mapping[str, Any] | Opponent) -> Callable[[int, int], Opponent]:
        if isinstance(opponent, Mapping):
            known = ChatModelSettings.__dataclass_fields__
            for name in opponent:
                if name not in known:
                    raise ConfigError(f"TextArena: opponent: unknown setting {name!r}; {nearest_name(name, known)}")
            if "model" not in opponent:
                raise ConfigError(f"TextArena: opponent: expected the setting 'model', got {sorted(opponent)}")
            self._chat_model = model = ChatModel(ChatModelSettings(**opponent))
            return lambda _seat, seed: lambda messages: model.reply(messages, seed=seed)
        if not isinstance(opponent, str):
            return lambda _seat, _seed: opponent
        if opponent == "scripted":
            scripted = scripted_player(self.game)
            if scripted is None:
                raise ConfigError(f"TextArena: opponent 'scripted': nobody has written a player of {self.game}")
            return lambda _seat, seed: scripted(self, generator(seed, "scripted"))
        if opponent in ("random", "self"):
            return lambda _seat, seed: RandomMover(generator(seed, "random"))
        known_names = ("random", "scripted", "self")
        raise ConfigError(f"TextArena: unknown opponent {opponent!r}; {nearest_name(opponent, known_names)}")


def _policies(scripted: PolicyFactory | None, *, is_sure: bool) -> Mapping[str, PolicyFactory]:
    policies: dict[str, PolicyFactory] = {"random": lambda _env, rng: RandomMover(rng)}
    if scripted is not None:
        policies["scripted"] = scripted
        if is_sure:  # against others, even a perfect player may not win
            policies["reference"] = scripted
    return policies


def _is_async(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


_SUFFIX = "-raw"
_GAME = -1  # textarena.GAME_ID, the speaker of the game's own texts
_MAX_PLAYERS = 16  # tried to find the fewest that a game allows
_downloading = threading.Lock()


@dataclass(frozen=True, slots=True)
class Said:
    """One entry of a player's observation."""

    speaker: str
    text: str


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a match.

    Attributes:
        rewards: by seat, as the game gave them; empty if it gave none.
        reports: by seat: role, invalid_move, turn_count and reason, as far as the game reports them.
    """

    rewards: Mapping[int, float]
    reports: Mapping[int, Mapping[str, Any]]


class Match:
    """A game with seats 0 to num_players - 1; the seed determines all of it."""

    def __init__(self, game: str, num_players: int, seed: int) -> None:
        self.game, self.num_players = game, num_players
        self._generators = OwnGenerators(child_seed(seed, "textarena"))
        with self._generators.in_place():
            # Seeded before it is made, because some games draw in the constructor; and by its own argument, so a
            # seed gives the game that it gives to other users of TextArena.
            self._game = make_game(game)
            try:
                self._game.reset(num_players=num_players, seed=seed)
            except Exception as error:
                text = f"{game}: reset with {num_players} players raised {type(error).__name__}: {error}"
                raise EnvError(text) from error

    @property
    def is_over(self) -> bool:
        return bool(self._game.state.done)

    @property
    def seat_to_move(self) -> int:
        return int(self._game.state.current_player_id)

    def say(self, text: str) -> None:
        """Say `text` as the player to move; an EnvError if the game raised."""
        with self._generators.in_place():
            try:
                self._game.step(action=text)
            except Exception as error:
                raise EnvError(f"{self.game}: step raised {type(error).__name__}: {error}") from error

    def news(self, seat: int) -> list[Said]:
        """Return what that player was told since the last call, without the echo of what it said."""
        if seat == self.seat_to_move and not self.is_over:
            with self._generators.in_place():
                _, entries = self._game.get_observation()
        else:  # TextArena gives observations to the player to move only, but the last ones are for all
            entries = self._game.state.observations[seat]
            self._game.state.observations[seat] = []
        straight = map(_straightened, entries)
        return [Said(self._name(who), str(text)) for who, text, kind in straight if not self._is_echo(seat, who, kind)]

    def result(self) -> Result:
        """Return the result; a ContractError if the rewards are no finite numbers by seat."""
        rewards, reports = self._game.close()
        if rewards is not None and not isinstance(rewards, Mapping):
            raise ContractError(f"{self.game}: expected rewards by player, got {rewards!r:.80}")
        for seat, reward in (rewards or {}).items():
            if not isinstance(reward, numbers.Real) or not is_finite(reward):
                raise ContractError(f"{self.game}: expected a finite reward of player {seat}, got {reward!r:.80}")
        return Result({int(seat): float(reward) for seat, reward in (rewards or {}).items()}, dict(reports or {}))

    def _name(self, speaker: int) -> str:
        names = getattr(self._game.state, "role_mapping", None) or {}
        return str(names.get(speaker, "GAME" if speaker == _GAME else f"Player {speaker}"))

    def _is_echo(self, seat: int, speaker: int, kind: Any) -> bool:
        # In some games for one player, the player's words come as the game's own.
        return kind.name == "PLAYER_ACTION" and (speaker == seat or self.num_players == 1)


def make_game(game: str) -> Any:
    """Return a new game object, made without a download.

    Raises:
        MissingExtraError: textarena is not installed.
        UnknownNameError: there is no such game; names the nearest.
        ConfigError: the game needs data that is missing on this machine, a key, or a newer Python.
    """
    textarena = _textarena()
    if game + _SUFFIX not in _registry(textarena):
        raise UnknownNameError(f"TextArena: unknown game {game!r}; {nearest_name(game, games())}")
    try:
        with _without_downloads():
            return textarena.make(game + _SUFFIX)
    except LookupError as error:  # raised by nltk for a missing corpus
        raise ConfigError(
            f"TextArena: {game} needs word lists of nltk that are not on this machine, and nothing is downloaded "
            "silently; get them with: python -m nltk.downloader words averaged_perceptron_tagger_eng"
        ) from error
    except (Exception, SyntaxError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ConfigError(f"TextArena: {game} cannot be made here: {type(error).__name__}: {first_line}") from error


def games() -> tuple[str, ...]:
    """Return the names of all games of the installed textarena, without the ending "-raw"."""
    return tuple(name.removesuffix(_SUFFIX) for name in _registry(_textarena()) if name.endswith(_SUFFIX))


@functools.cache
def fewest_players(game: str) -> int:
    """Return the smallest number of players with which a game starts; a ConfigError for none up to 16."""
    # TextArena declares no number; games refuse a wrong one when they start. A few start with one player although
    # they are not written for it: they have no `SinglePlayerState`.
    single_player = _textarena().SinglePlayerState
    reason = ""
    for num_players in range(1, _MAX_PLAYERS + 1):
        generators = OwnGenerators(0)
        with generators.in_place():
            made = make_game(game)
            try:
                made.reset(num_players=num_players, seed=0)
            except Exception as error:  # most games assert, but not all
                reason = reason or f"{type(error).__name__}: {error}"
                continue
        if num_players > 1 or isinstance(made.state, single_player):
            return num_players
    raise ConfigError(f"TextArena: {game} starts with no number of players from 1 to {_MAX_PLAYERS}: {reason}")


def as_text(said: Sequence[Said], *, with_speakers: bool) -> str:
    """Return entries as one text, a line each, with the names of speakers if asked."""
    return "\n".join(f"[{entry.speaker}] {entry.text}" if with_speakers else entry.text for entry in said)


def _straightened(entry: tuple[Any, Any, Any]) -> tuple[int, Any, Any]:
    first, second, third = entry  # (speaker, text, kind); three games of 0.7.4 enter (kind, speaker, text)
    return (second, third, first) if hasattr(first, "name") else entry


def _textarena() -> Any:
    with _without_downloads():
        names = ("textarena:make", "textarena:SinglePlayerState", "textarena:envs.registration.ENV_REGISTRY")
        return import_package("TextArena", "textarena", *names, extra="envs-textarena")


def _registry(textarena: Any) -> Mapping[str, Any]:
    registry: Mapping[str, Any] = textarena.envs.registration.ENV_REGISTRY
    return registry


@contextmanager
def _without_downloads() -> Iterator[None]:
    # Games call `nltk.download` when imported or made, even for data that is there.
    try:
        nltk: Any = importlib.import_module("nltk")
    except ImportError:
        nltk = None
    with _downloading if nltk is not None else nullcontext():
        download = getattr(nltk, "download", None)
        try:
            if nltk is not None:
                nltk.download = lambda *_args, **_options: False
            yield
        finally:
            if nltk is not None:
                nltk.download = download


_BRACKETED = re.compile(r"\[[^\[\]\n]{1,40}\]")
_LEGAL = re.compile(r"(?:available|legal|valid|possible|allowed)[^\n]*?:[^\n]*(?:\n[^\n]*\[[^\n]*)*", re.IGNORECASE)
_SPEAKER = re.compile(r"^\[(?:GAME|Player[^\]]*)\] ", re.MULTILINE)


class RandomMover:
    """A player that says a move in square brackets: one listed as legal, else one like those shown.

    Games say "Available Moves: '[0]', '[4]'" or give examples in their rules. In an example, each whole number becomes
    a random digit half of the time, so in many games some of its moves are illegal.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def __call__(self, messages: Sequence[Message]) -> str:
        heard = [_SPEAKER.sub("", message.content) for message in messages if message.role != "assistant"]
        listed = [move for part in _LEGAL.findall(heard[-1]) for move in _BRACKETED.findall(part)]
        if listed:
            return self._one_of(listed)
        shown = _BRACKETED.findall(heard[0]) or _BRACKETED.findall(heard[-1])
        if not shown:
            return f"[{self._rng.integers(10)}]"
        return re.sub(r"\d+", self._varied, self._one_of(shown))

    def _varied(self, number: re.Match[str]) -> str:
        return number[0] if self._rng.random() < 0.5 else str(self._rng.integers(10))

    def _one_of(self, moves: Sequence[str]) -> str:
        return moves[int(self._rng.integers(len(moves)))]


def scripted_player(game: str) -> PolicyFactory | None:
    """Return the hand-written player of a game in any of its variants, or None."""
    return _SCRIPTED.get(game.partition("-v0")[0])


def bisect_number(_env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    """Return a player of GuessTheNumber that says the middle of what the hints leave."""

    def play(messages: Sequence[Message]) -> str:
        low, high = map(int, re.findall(r"between (\d+) and (\d+)", messages[0].content)[0])
        guess = (low + high) // 2
        for message in messages[1:]:
            if message.role == "user":
                low, high = (guess + 1, high) if "higher" in message.content else (low, guess - 1)
                guess = (low + high) // 2
        return f"[{guess}]"

    return play


def stack_disks(_env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    """Return a player of TowerOfHanoi that takes the shortest solution from any position."""

    def play(messages: Sequence[Message]) -> str:
        board = dict(re.findall(r"([ABC]): \[([\d, ]*)\]", messages[-1].content))
        peg_of = {int(disk): peg for peg, disks in board.items() for disk in disks.split(",") if disk.strip()}
        source, target = _next_disk_move(peg_of)
        return f"[{source} {target}]"

    return play


def _next_disk_move(peg_of: dict[int, str]) -> tuple[str, str]:
    # The largest misplaced disk moves once all smaller ones are on the third peg, which is then where they are wanted.
    wanted, move = "C", ("A", "C")
    for disk in sorted(peg_of, reverse=True):
        if peg_of[disk] != wanted:
            move = (peg_of[disk], wanted)
            wanted = next(peg for peg in "ABC" if peg not in move)
    return move


def balance_piles(_env: Any, rng: np.random.Generator) -> ScriptedPolicy:
    """Return a player of Nim that leaves piles whose exclusive or is 0, or else takes one object from any pile."""

    def play(messages: Sequence[Message]) -> str:
        piles = [(int(pile), int(left)) for pile, left in re.findall(r"pile (\d+): (\d+)", messages[-1].content)]
        piles = list(dict(piles).items())  # the last board, if several were shown
        balance = reduce(xor, (left for _, left in piles))
        for pile, left in piles:
            if left ^ balance < left:
                return f"[{pile} {left - (left ^ balance)}]"
        standing = [pile for pile, left in piles if left]
        return f"[{standing[int(rng.integers(len(standing)))]} 1]"

    return play


def never_lose_tic_tac_toe(_env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    """Return a player of TicTacToe that makes a move of the best value, by exhaustive search."""

    def play(messages: Sequence[Message]) -> str:
        board = messages[-1].content.rpartition("Current Board:")[2].partition("Available")[0]
        cells = tuple(cell if cell in "XO" else " " for cell in re.findall(r"[XO]|\d", board))
        me = "O" if cells.count("O") == cells.count("X") else "X"  # player 0 is O and begins
        best = max(_free(cells), key=lambda cell: -_value(_with(cells, cell, me), "X" if me == "O" else "O"))
        return f"[{best}]"

    return play


_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


@cache
def _value(cells: tuple[str, ...], to_move: str) -> int:  # 1, 0 or -1 under best play of both
    if any(cells[a] == cells[b] == cells[c] != " " for a, b, c in _LINES):
        return -1  # the other player has just won
    other = "X" if to_move == "O" else "O"
    return max((-_value(_with(cells, cell, to_move), other) for cell in _free(cells)), default=0)


def _free(cells: tuple[str, ...]) -> list[int]:
    return [cell for cell, mark in enumerate(cells) if mark == " "]


def _with(cells: tuple[str, ...], cell: int, mark: str) -> tuple[str, ...]:
    return (*cells[:cell], mark, *cells[cell + 1 :])


_SCRIPTED: dict[str, PolicyFactory] = {
    "GuessTheNumber": bisect_number,
    "TowerOfHanoi": stack_disks,
    "Nim": balance_piles,
    "TicTacToe": never_lose_tic_tac_toe,
}
