"""One match of a TextArena game, and hand-written players that read only the conversation.

A match uses the game's "-raw" form, whose observations are lists of (speaker, text, kind); the other forms repeat the
history every turn. Reading an observation empties it, so each player's is read once, here.
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
        """Return what that player was told since the last call, without the echo of its own words."""
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
            if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
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
