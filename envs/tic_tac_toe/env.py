"""TicTacToe: three in a line before the opponent, who plays at random, perfectly, or as a function of yours says.

`README.md` beside this file has the rules, the rewards and a transcript; `board.py` holds the board and perfect play,
`opponents.py` who answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from gymnasium.error import ResetNeeded

from gspo_gym.env.core import Info, PolicyFactory, SmallTask, TextEnv
from gspo_gym.env.rewards import Reward
from gspo_gym.errors import ConfigError, UnknownNameError, nearest_name

from .board import EMPTY, free_cells, is_over, other, placed, value, value_after, winner
from .opponents import Opponent, checked_move, perfect_opponent, random_opponent
from .policies import best_play, perfect_play, random_moves

Style = Literal["terse", "verbose"]
StepTuple = tuple[str, Reward, bool, bool, Info]

_OPPONENTS = ("random", "minimax", "self")
_MOST_BLUNDERS = {"minimax": 1, "self": 7}  # in one game: a perfect opponent gives nothing back (a test counts them)
_RESULTS = {"won": "You have won.", "lost": "You have lost.", "draw": "It is a draw.", "forfeit": "You have forfeited."}


class TicTacToe(TextEnv):
    """Put X onto free cells, numbered 1 to 9 row by row, until three are in a line; the opponent puts O.

    An action is a move if the text, stripped of white space, is the digit of a free cell. Anything else is illegal and
    changes nothing; after `max_illegal` illegal answers the game is forfeited. The episode *terminates* with the game.

    Args:
        opponent: "random"; "minimax" (perfect play: a draw is the best that can be had); "self" (the model plays both
            sides in turns, and is to play both well: see `README.md`); or a function of the board (a string of nine
            characters, "X", "O" or a space) and its side that gives the cell it takes, 0 to 8.
        first: who begins: "drawn" from the seed, "agent" or "opponent". With opponent="self", X begins.
        max_illegal: illegal answers that forfeit the game, at least 1.
        won_reward, draw_reward: for the result, 0 < draw_reward <= won_reward; a lost game earns 0.
        blunder_penalty: subtracted for a move that gives away a result which was certain, >= 0; only against "minimax"
            and "self" (elsewhere a gamble can be right).
        illegal_penalty: subtracted for an illegal answer, >= 0.
        style: "verbose" (sentences) or "terse" (a few bytes beside the board).

    Attributes (read by the scripted policies):
        board: see `board.py`. side: the side that the model moves next. answerer: the opponent as a function, None with
        "self". opponent: as given.

    Reset options: `first`, "agent" or "opponent", to choose who begins instead of drawing it.

    >>> env = TicTacToe(style="terse", first="agent")
    >>> print(env.reset(seed=0)[0])
    You X.
    123
    456
    789
    """

    isolation = "thread"
    any_thread = True
    policies: ClassVar[Mapping[str, PolicyFactory]] = {
        "reference": best_play,
        "minimax": perfect_play,
        "random": random_moves,
    }
    small_task: ClassVar[SmallTask | None] = SmallTask(style={"style": "terse"})

    def __init__(
        self,
        *,
        opponent: str | Opponent = "random",
        first: Literal["drawn", "agent", "opponent"] = "drawn",
        max_illegal: int = 3,
        won_reward: float = 1.0,
        draw_reward: float = 0.5,
        blunder_penalty: float = 0.1,
        illegal_penalty: float = 0.1,
        style: Style = "verbose",
    ) -> None:
        if isinstance(opponent, str) and opponent not in _OPPONENTS:
            raise UnknownNameError(f"TicTacToe: unknown opponent {opponent!r}; {nearest_name(opponent, _OPPONENTS)}")
        if first not in ("drawn", "agent", "opponent") or (opponent == "self" and first != "drawn"):
            raise ConfigError(
                "TicTacToe: expected first to be 'drawn', 'agent' or 'opponent', and nothing else than 'drawn' with "
                f"opponent='self', got first={first!r}"
            )
        if max_illegal < 1:
            raise ConfigError(f"TicTacToe: expected max_illegal >= 1, got {max_illegal}")
        if not (0 < draw_reward <= won_reward and blunder_penalty >= 0 and illegal_penalty >= 0):
            raise ConfigError(
                "TicTacToe: expected 0 < draw_reward <= won_reward and penalties >= 0, got "
                f"won_reward={won_reward}, draw_reward={draw_reward}, blunder_penalty={blunder_penalty}, "
                f"illegal_penalty={illegal_penalty}"
            )
        if style not in ("terse", "verbose"):
            raise ConfigError(f"TicTacToe: expected style 'terse' or 'verbose', got {style!r}")
        self.opponent, self.first, self.max_illegal, self.style = opponent, first, max_illegal, style
        self._weights = {
            "won": won_reward,
            "draw": draw_reward,
            "blunder": -blunder_penalty,
            "illegal": -illegal_penalty,
        }
        kind = opponent if isinstance(opponent, str) else ""
        self._scores_blunders = kind in _MOST_BLUNDERS
        worst = -illegal_penalty * max_illegal - blunder_penalty * _MOST_BLUNDERS.get(kind, 0)
        self.reward_range = (worst, draw_reward if self._scores_blunders else won_reward)
        self.board, self.side = EMPTY, "X"
        self.answerer: Opponent | None = None
        self._is_playing = False
        self._illegal_left = 0

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, Info]:
        super().reset(seed=seed)
        # Both are drawn always, so that no option moves the generator's later draws.
        drawn = "agent" if self.np_random.random() < 0.5 else "opponent"
        order = [int(cell) for cell in self.np_random.permutation(9)]
        first = drawn if self.first == "drawn" else self.first
        if options:
            first = self._first_from(options)
        self.board, self.side = EMPTY, "X"
        self._is_playing, self._illegal_left = True, self.max_illegal
        if callable(self.opponent):
            self.answerer = self.opponent
        else:
            makers = {"random": random_opponent, "minimax": perfect_opponent}
            self.answerer = makers[self.opponent](order) if self.opponent in makers else None
        if first == "opponent":
            self._let_answer()
        return f"{self._rules()}\n{self._view()}", {}

    def step(self, action: str) -> StepTuple:
        self._require_episode("step")
        text = action.strip()
        if len(text) != 1 or text not in "123456789":
            return self._illegal("not 1-9")
        cell = int(text) - 1
        if cell not in free_cells(self.board):
            return self._illegal("taken")
        scores = {}
        if self._scores_blunders and value_after(self.board, cell, self.side) < value(self.board, self.side):
            scores["blunder"] = 1.0
        self.board = placed(self.board, cell, self.side)
        if self.answerer is None:
            self.side = other(self.side)
        elif not is_over(self.board):
            self._let_answer()
        return self._end(scores) if is_over(self.board) else self._go_on("", scores)

    def invalid_action(self, error: str) -> StepTuple:
        """An answer that could not even be read is illegal like any other."""
        self._require_episode("invalid_action")
        return self._illegal(error)

    def _require_episode(self, method: str) -> None:
        if not self._is_playing:
            raise ResetNeeded(f"TicTacToe.{method}: no episode is being played; call reset first")

    def _let_answer(self) -> None:
        """The opponent's move; with "self" there is none."""
        if self.answerer is not None:
            opponents_side = other(self.side)
            cell = checked_move(self.answerer, self.board, opponents_side)
            self.board = placed(self.board, cell, opponents_side)

    def _illegal(self, error: str) -> StepTuple:
        self._illegal_left -= 1
        if self._illegal_left > 0:
            return self._go_on(f"{error}\n", {"illegal": 1.0})
        self._is_playing = False
        reward = Reward.weighted({"illegal": 1.0}, self._weights, success=False)
        return self._result("forfeit"), reward, True, False, {}

    def _go_on(self, answer: str, scores: Mapping[str, float]) -> StepTuple:
        turn = f"{self.side} to move\n" if self.answerer is None else ""
        return f"{answer}{turn}{self._view()}", Reward.weighted(scores, self._weights), False, False, {}

    def _end(self, scores: Mapping[str, float]) -> StepTuple:
        """The game is over. Playing both sides, only a draw earns: a win would be the other side's doing."""
        self._is_playing = False
        won = winner(self.board)
        if self.answerer is None:
            result, is_best = ("draw", True) if won is None else ("lost", False)
            text = "draw" if won is None else f"{won} won"
        else:
            result = "draw" if won is None else "won" if won == self.side else "lost"
            is_best = result == "won" or (result == "draw" and self._scores_blunders)
            text = result
        earned = {} if result == "lost" else {result: 1.0}
        events = (result,) if earned else ()
        reward = Reward.weighted({**earned, **scores}, self._weights, events=events, success=is_best)
        return self._result(text), reward, True, False, {}

    def _result(self, text: str) -> str:
        return text if self.style == "terse" else _RESULTS.get(text, f"{text}.")

    def _rules(self) -> str:
        if self.style == "terse":
            return "You X." if self.answerer is not None else "X to move"
        who = "You play X, I play O." if self.answerer is not None else "You play both sides in turns; X begins."
        return (
            f"Tic-tac-toe: three in a line win. {who} Free cells are shown by their number. "
            "Answer with the number of a free cell alone."
        )

    def _view(self) -> str:
        shown = "".join(str(cell + 1) if letter == " " else letter for cell, letter in enumerate(self.board))
        return f"{shown[:3]}\n{shown[3:6]}\n{shown[6:]}"

    def _first_from(self, options: Mapping[str, Any]) -> str:
        if set(options) != {"first"} or options["first"] not in ("agent", "opponent") or self.opponent == "self":
            raise ConfigError(
                "TicTacToe.reset: expected the option first to be 'agent' or 'opponent' and the opponent not to be "
                f"'self', got {dict(options)}"
            )
        return str(options["first"])
