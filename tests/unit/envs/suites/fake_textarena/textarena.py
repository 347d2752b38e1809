"""A stand-in for the package textarena: its interface as version 0.7.4 has it, and a handful of tiny games.

What it has in common with the real one and an adapter may stumble over: the generator of the module `random` is seeded,
reading an observation empties it, what a player says is told to it again, and games download word lists unasked.
"""

from __future__ import annotations

import enum
import random
import re
from types import SimpleNamespace

GAME_ID = -1


class ObservationType(enum.Enum):
    PROMPT = enum.auto()
    PLAYER_ACTION = enum.auto()
    GAME_MESSAGE = enum.auto()
    GAME_ADMIN = enum.auto()


class State:
    def __init__(self, num_players, seed=None):
        if seed is not None:
            random.seed(seed)
        self.num_players, self.current_player_id, self.done, self.rewards = num_players, 0, False, None
        self.role_mapping = {GAME_ID: "GAME", **{pid: f"Player {pid}" for pid in range(num_players)}}
        self.game_info = {pid: {"role": f"Player {pid}", "invalid_move": False} for pid in range(num_players)}
        self.observations = {pid: [] for pid in range(num_players)}
        self.errors = 0

    def add_observation(self, message, observation_type, from_id=GAME_ID, to_id=-1):
        for pid in self.observations if to_id == -1 else [to_id]:
            self.observations[pid].append((from_id, message, observation_type))

    def get_current_player_observation(self):
        entries, self.observations[self.current_player_id] = self.observations[self.current_player_id], []
        return entries

    def end(self, rewards, reason):
        self.rewards, self.done = rewards, True
        for info in self.game_info.values():
            info["reason"] = reason


class SinglePlayerState(State):
    pass


class Env:
    fewest, most = 1, 1

    def reset(self, num_players, seed=None):
        assert self.fewest <= num_players <= self.most, f"{num_players} players"
        self.state = (SinglePlayerState if self.most == 1 else State)(num_players, seed)
        self.start()
        for pid in range(num_players):
            self.state.add_observation(self.rules(pid), ObservationType.PROMPT, to_id=pid)

    def start(self):
        pass

    def get_observation(self):
        return self.state.current_player_id, self.state.get_current_player_observation()

    def echo(self, action):
        self.state.add_observation(action, ObservationType.PLAYER_ACTION, from_id=self.state.current_player_id)

    def close(self):
        return self.state.rewards, self.state.game_info


class Guess(Env):
    """One number from 0 to 99. The first wrong form is forgiven, the next one ends the game."""

    def start(self):
        self.number = random.randint(0, 99)

    def rules(self, pid):
        return "Guess a number, such as [5]."

    def step(self, action):
        self.echo(action)
        match = re.search(r"\[(\d+)\]", action)
        if match is None:
            self.state.errors += 1
            self.state.add_observation("Invalid move.", ObservationType.GAME_ADMIN)
            if self.state.errors == 2:
                self.state.game_info[0]["invalid_move"] = True
                self.state.end({0: -1}, "Invalid move.")
        elif int(match[1]) == self.number:
            self.state.end({0: 1}, "Right.")
        else:
            hint = "lower" if int(match[1]) > self.number else "higher"
            self.state.add_observation(f"It is {hint}.", ObservationType.GAME_MESSAGE)


class Race(Env):
    """Players add 1, 2 or 3 in turn; who reaches 10 wins. Each has a secret that only it is told."""

    fewest, most = 2, 3

    def start(self):
        self.total = 0

    def rules(self, pid):
        return f"You are Player {pid}. Your secret is {pid}{pid}{pid}. Available Moves: '[1]', '[2]', '[3]'"

    def step(self, action):
        pid = self.state.current_player_id
        self.echo(action)
        self.total += int(re.search(r"\[([123])\]", action)[1])
        self.state.add_observation(
            f"Total {self.total}. Available Moves: '[1]', '[2]', '[3]'", ObservationType.GAME_MESSAGE
        )
        if self.total >= 10:
            self.state.end({p: 1 if p == pid else -1 for p in range(self.state.num_players)}, f"Player {pid} wins.")
        else:
            self.state.current_player_id = (pid + 1) % self.state.num_players


class Words(Guess):
    def __init__(self):
        import nltk

        nltk.download("words")
        raise LookupError("\nResource words not found.")


class Unscored(Guess):
    def step(self, action):
        self.state.end(None, "Nobody counts.")


class Swapped(Guess):
    def step(self, action):
        self.state.end({0: "a reason where a reward should be"}, 0.5)


class Disordered(Guess):
    """Gives its arguments in the wrong order, as three real games do."""

    def echo(self, action):
        self.state.add_observation(0, action, ObservationType.PLAYER_ACTION)


class Crashing(Guess):
    def step(self, action):
        raise ZeroDivisionError("division by zero")


class Endless(Race):
    """The other player is always to move."""

    def step(self, action):
        self.state.current_player_id = 1


_GAMES = {f"{game.__name__}-v0{form}": game for game in Env.__subclasses__() for form in ("", "-train", "-raw")}
_GAMES |= {f"{game.__name__}-v0-raw": game for base in (Guess, Race) for game in base.__subclasses__()}
envs = SimpleNamespace(registration=SimpleNamespace(ENV_REGISTRY=_GAMES))


def make(name):
    return _GAMES[name]()
