"""`TextArenaEnv`: games of the package `textarena`, in which the model plays one seat, or all of them.

The game decides on legal moves, the end and the rewards. The other seats are played inside `reset` and `step`:
at random, by a hand-written player, by a model behind an endpoint, or by a function.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from gymnasium.error import ResetNeeded

from gspo_gym.env.chat_model import ChatModel, ChatModelSettings
from gspo_gym.env.core import Info, PolicyFactory, TextEnv, driven
from gspo_gym.env.data.splits import next_seed
from gspo_gym.env.rewards import Reward
from gspo_gym.env.suites.textarena_match import Match, RandomMover, Said, as_text, fewest_players, scripted_player
from gspo_gym.errors import ConfigError, ContractError, EnvError, nearest_name
from gspo_gym.seeding import child_seed, generator
from gspo_gym.types import Message

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

    With opponent "self", one conversation plays every seat in turn and holds what is told to any of them, which suits
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
        return text if match.is_over else f"{text}\n{_turn_of(self.seat)}".lstrip("\n")

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


def _turn_of(seat: int) -> str:
    return f"You are Player {seat} now."


def _is_async(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
