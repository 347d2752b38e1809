"""One match of a TextArena game: the foreign game object, asked for as little as possible. Called by `textarena.py`.

Always the game's "-raw" form, whose observations are lists of (speaker, text, kind) that only grow; the other forms
repeat the whole history every turn. Reading them empties them, so each player's are read once, here.
"""

from __future__ import annotations

import functools
import importlib
import math
import numbers
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from gspo_gym.env.suites.own_generators import OwnGenerators
from gspo_gym.errors import ConfigError, ContractError, EnvError, MissingExtraError, UnknownNameError, nearest_name
from gspo_gym.seeding import child_seed

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
