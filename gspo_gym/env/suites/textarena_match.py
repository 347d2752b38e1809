"""One match of a TextArena game: the foreign game object, asked for as little as possible.

Always the game's "-raw" form, whose observations are lists of (speaker, text, kind) that only grow; the other forms
repeat the whole history every turn. Reading them empties them, so each player's are read once, here.

Hand-written players of TextArena's games. What they know is in the conversation; none reads the game's state.
"""

from __future__ import annotations

import functools
import importlib
import math
import numbers
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, reduce
from operator import xor
from typing import Any

import numpy as np

from gspo_gym.env.core import PolicyFactory, ScriptedPolicy
from gspo_gym.env.suites.reasoning_gym import OwnGenerators
from gspo_gym.errors import ConfigError, ContractError, EnvError, MissingExtraError, UnknownNameError, nearest_name
from gspo_gym.seeding import child_seed
from gspo_gym.types import Message

_SUFFIX = "-raw"
_GAME = -1  # textarena.GAME_ID: the game itself speaks
_MAX_PLAYERS = 16  # tried when a game is asked how few it takes
_downloading = threading.Lock()


@dataclass(frozen=True, slots=True)
class Said:
    """One entry of a player's observation."""

    speaker: str
    text: str


@dataclass(frozen=True, slots=True)
class Result:
    """How a match ended.

    Attributes:
        rewards: by seat, as the game gave them; empty if it gave none.
        reports: by seat: role, invalid_move, turn_count and reason, as far as the game says.
    """

    rewards: Mapping[int, float]
    reports: Mapping[int, Mapping[str, Any]]


class Match:
    """A fresh game with its players' seats, 0 to num_players - 1. Everything in it follows from the seed.

    Raises:
        ConfigError, UnknownNameError, MissingExtraError: the game cannot be made here; see `make_game`.
        EnvError: it does not start.
    """

    def __init__(self, game: str, num_players: int, seed: int) -> None:
        self.game, self.num_players = game, num_players
        self._generators = OwnGenerators(child_seed(seed, "textarena"))
        with self._generators.in_place():
            # Seeded before it is made, because some games draw in the constructor; and by its own argument, so that a
            # seed means the same game here as it does to other users of TextArena.
            self._game = make_game(game)
            try:
                self._game.reset(num_players=num_players, seed=seed)
            except Exception as error:
                text = f"{game}: reset with {num_players} players raised {type(error).__name__}: {error}"
                raise EnvError(text) from error

    @property
    def is_over(self) -> bool:
        """Whether the game has ended, by its own rules."""
        return bool(self._game.state.done)

    @property
    def seat_to_move(self) -> int:
        """Whose turn it is."""
        return int(self._game.state.current_player_id)

    def say(self, text: str) -> None:
        """The player whose turn it is says `text`.

        Raises:
            EnvError: the game raised.
        """
        with self._generators.in_place():
            try:
                self._game.step(action=text)
            except Exception as error:
                raise EnvError(f"{self.game}: step raised {type(error).__name__}: {error}") from error

    def news(self, seat: int) -> list[Said]:
        """What that player was told since it was last asked for, without the echo of what it said itself."""
        if seat == self.seat_to_move and not self.is_over:
            with self._generators.in_place():
                _, entries = self._game.get_observation()
        else:  # TextArena shows observations to nobody but the player to move; the last one is for all
            entries = self._game.state.observations[seat]
            self._game.state.observations[seat] = []
        straight = map(_straightened, entries)
        return [Said(self._name(who), str(text)) for who, text, kind in straight if not self._is_echo(seat, who, kind)]

    def result(self) -> Result:
        """How it ended.

        Raises:
            ContractError: the rewards are no finite numbers by seat.
        """
        rewards, reports = self._game.close()
        if rewards is not None and not isinstance(rewards, Mapping):
            raise ContractError(f"{self.game}: expected rewards by player, got {rewards!r:.80}")
        for seat, reward in (rewards or {}).items():
            if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
                raise ContractError(f"{self.game}: expected a finite reward of player {seat}, got {reward!r:.80}")
        return Result({int(seat): float(reward) for seat, reward in (rewards or {}).items()}, dict(reports or {}))

    def _name(self, speaker: int) -> str:
        names = getattr(self._game.state, "role_mapping", None) or {}
        return str(names.get(speaker, "GAME" if speaker == _GAME else f"Player {speaker}"))

    def _is_echo(self, seat: int, speaker: int, kind: Any) -> bool:
        """Whether it repeats what this player said, which stands in its conversation already.

        Some games of one player enter the player's words as the game's own.
        """
        return kind.name == "PLAYER_ACTION" and (speaker == seat or self.num_players == 1)


def make_game(game: str) -> Any:
    """A new game object (Any: textarena is untyped), made without a download.

    Raises:
        MissingExtraError: textarena is not installed.
        UnknownNameError: no such game; says the nearest.
        ConfigError: the game needs data that is not on this machine, a key, or a newer Python; says which.
    """
    textarena = _textarena()
    if game + _SUFFIX not in _registry(textarena):
        raise UnknownNameError(f"TextArena: unknown game {game!r}; {nearest_name(game, games())}")
    try:
        with _without_downloads():
            return textarena.make(game + _SUFFIX)
    except LookupError as error:  # what nltk raises for a corpus that is not there
        raise ConfigError(
            f"TextArena: {game} needs word lists of nltk that are not on this machine, and nothing is downloaded "
            "silently; get them with: python -m nltk.downloader words averaged_perceptron_tagger_eng"
        ) from error
    except (Exception, SyntaxError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ConfigError(f"TextArena: {game} cannot be made here: {type(error).__name__}: {first_line}") from error


def games() -> tuple[str, ...]:
    """The names of all games of the installed textarena, without the ending "-raw".

    Raises:
        MissingExtraError: textarena is not installed.
    """
    return tuple(name.removesuffix(_SUFFIX) for name in _registry(_textarena()) if name.endswith(_SUFFIX))


@functools.cache
def fewest_players(game: str) -> int:
    """How many players a game needs at least: the first number with which it starts.

    TextArena does not say it; games refuse a wrong number when they start. A game that is not written for one player
    alone (has no `SinglePlayerState`) is not asked to play with one, though some do not refuse it.

    Raises:
        as `make_game`; ConfigError: it starts with no number of players up to 16.
    """
    single_player = _textarena().SinglePlayerState
    reason = ""
    for num_players in range(1, _MAX_PLAYERS + 1):
        generators = OwnGenerators(0)
        with generators.in_place():
            made = make_game(game)
            try:
                made.reset(num_players=num_players, seed=0)
            except Exception as error:  # an assertion in most games, but by no means in all
                reason = reason or f"{type(error).__name__}: {error}"
                continue
        if num_players > 1 or isinstance(made.state, single_player):
            return num_players
    raise ConfigError(f"TextArena: {game} starts with no number of players from 1 to {_MAX_PLAYERS}: {reason}")


def as_text(said: Sequence[Said], *, with_speakers: bool) -> str:
    """Entries as one text, a line each; several players are told apart by name."""
    return "\n".join(f"[{entry.speaker}] {entry.text}" if with_speakers else entry.text for entry in said)


def _straightened(entry: tuple[Any, Any, Any]) -> tuple[int, Any, Any]:
    """(speaker, text, kind); three games of 0.7.4 enter what a player said as (kind, speaker, text)."""
    first, second, third = entry
    return (second, third, first) if hasattr(first, "name") else entry


def _textarena() -> Any:
    try:
        with _without_downloads():
            return importlib.import_module("textarena")
    except ImportError as error:
        raise MissingExtraError("TextArena's games need: pip install 'gspo-gym[envs-textarena]'") from error


def _registry(textarena: Any) -> Mapping[str, Any]:
    registry: Mapping[str, Any] = textarena.envs.registration.ENV_REGISTRY
    return registry


@contextmanager
def _without_downloads() -> Iterator[None]:
    """Inside, `nltk.download` does nothing: games call it when they are imported or made, whatever it answers."""
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
    """Says something in square brackets: one of the moves listed as legal, else like one that was shown.

    Games say "Available Moves: '[0]', '[4]'" or give examples in their rules. An example is varied: each of its whole
    numbers becomes a random digit half of the time. So in many games a part of its moves is not legal.
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
    """The hand-written player of a game, in any of its variants; None if there is none."""
    return _SCRIPTED.get(game.partition("-v0")[0])


def bisect_number(_env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    """GuessTheNumber: the middle of what the hints leave."""

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
    """TowerOfHanoi: the shortest solution, from wherever the disks lie."""

    def play(messages: Sequence[Message]) -> str:
        board = dict(re.findall(r"([ABC]): \[([\d, ]*)\]", messages[-1].content))
        peg_of = {int(disk): peg for peg, disks in board.items() for disk in disks.split(",") if disk.strip()}
        source, target = _next_disk_move(peg_of)
        return f"[{source} {target}]"

    return play


def _next_disk_move(peg_of: dict[int, str]) -> tuple[str, str]:
    """The largest disk that is not where it should be moves, when all smaller ones are on the third peg."""
    wanted, move = "C", ("A", "C")
    for disk in sorted(peg_of, reverse=True):
        if peg_of[disk] != wanted:
            move = (peg_of[disk], wanted)
            wanted = next(peg for peg in "ABC" if peg not in move)
    return move


def balance_piles(_env: Any, rng: np.random.Generator) -> ScriptedPolicy:
    """Nim: leaves piles whose exclusive or is 0, if that can be done; if not, takes one object from any pile."""

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
    """TicTacToe: a move of the best value, found by trying all."""

    def play(messages: Sequence[Message]) -> str:
        board = messages[-1].content.rpartition("Current Board:")[2].partition("Available")[0]
        cells = tuple(cell if cell in "XO" else " " for cell in re.findall(r"[XO]|\d", board))
        me = "O" if cells.count("O") == cells.count("X") else "X"  # player 0 is O and begins
        best = max(_free(cells), key=lambda cell: -_value(_with(cells, cell, me), "X" if me == "O" else "O"))
        return f"[{best}]"

    return play


_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


@cache
def _value(cells: tuple[str, ...], to_move: str) -> int:
    """1, 0 or -1 for the player to move, if both play their best."""
    if any(cells[a] == cells[b] == cells[c] != " " for a, b, c in _LINES):
        return -1  # the other one has just won
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
