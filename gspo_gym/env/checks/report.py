"""The checks of `checker.check_env`, in order: what each promises, and the function that finds out.

By theme: `checks_contract.py` (what is declared and answered), `checks_play.py` (alone, beside others, in workers),
`checks_cost.py` (time and leaks), `checks_score.py` (what is rewarded), `checks_copying.py` (answers that are shown).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from gspo_gym.env.checks import contract, copying, cost, play, score
from gspo_gym.env.checks.subject import Findings, Subject

Check = Callable[[Subject, Findings], Awaitable[None]]

# If one of the first two fails, the rest has nothing to judge. What "isolation" reports is found while playing.
CHECKS: Mapping[str, tuple[str, Check | None]] = {
    "construction": ("every call of the factory makes a fresh, well-declared environment", contract.constructs),
    "play": ("reset and step answer in the agreed types and shapes, in time", play.plays),
    "isolation": ("nothing that a process shares is touched, or it runs in a process of its own", None),
    "messages": (
        "every call is answered, none of a tool only by errors, and nothing in the model's name",
        contract.speaks,
    ),
    "determinism": ("instances under one seed play alike while others run beside them", play.is_deterministic),
    "reset": ("an instance that was played and reset plays like a fresh one", play.resets),
    "reward range": ("returns stay in reward_range", contract.rewards_in_range),
    "end": ("time limits hold, and reset follows the end", contract.ends),
    "invalid action": ("text that could not be read is answered", contract.takes_invalid_actions),
    "close": ("closing twice is fine, before and after an episode", contract.closes),
    "time": ("reset and step answer within max_step_seconds, if that is given", cost.answers_in_time),
    "leaks": ("episodes leave no files, threads, child processes or memory behind", cost.leaks_nothing),
    "reference": ("the reference policy earns the top score", score.reference_is_best),
    "tricks": ("no trick succeeds, and neither tricks nor random play earn as much", score.tricks_do_not_pay),
    "copying": ("the answer stands nowhere in the first observation or info", copying.nothing_shown_is_the_answer),
    "gymnasium": ("Gymnasium's own checker accepts it", contract.gymnasium_agrees),
}
