"""Achievements: the named events of an episode, for environments in which much can be reached on the way.

An environment calls `unlock` where something is achieved and gives `turn_events()` to the `Reward` of the turn. From
there the names go into `Turn.events`, which step rewards count and which a judge is shown. Whether a name counts once
an episode ("unique") or in every turn that reaches it ("absolute") is a setting of the training
(`training.event_rewards_kind`), not of the environment, which reports every time.
"""

from __future__ import annotations

from collections.abc import Iterable

from gspo_gym.errors import ContractError, nearest_name


class Achievements:
    """What can be achieved, what has been in this episode, and what in this turn.

    Args:
        names: all that there are; a name that is not among them is refused, so that a typing error earns nothing.

    Attributes:
        names: as given.

    Raises:
        ContractError: a name is given twice, or is no name.

    >>> achievements = Achievements(["collect_wood", "place_table"])
    >>> achievements.unlock("collect_wood"), achievements.unlock("collect_wood")
    (True, False)
    >>> achievements.turn_events()
    ('collect_wood',)
    >>> achievements.unlock("collect_wood"), achievements.turn_events()  # not new, but reached again
    (False, ('collect_wood',))
    >>> achievements.turn_events(), achievements.unlocked
    ((), ('collect_wood',))
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        if isinstance(names, str) or not all(isinstance(name, str) and name for name in self.names):
            raise ContractError(f"Achievements: expected a collection of names, got {names!r:.80}")
        if len(set(self.names)) < len(self.names):
            raise ContractError(f"Achievements: expected each name once, got {list(self.names)}")
        self._unlocked: dict[str, None] = {}  # in the order in which they were reached first
        self._of_turn: dict[str, None] = {}

    @property
    def unlocked(self) -> tuple[str, ...]:
        """Those of this episode, each once, in the order in which they were reached first."""
        return tuple(self._unlocked)

    def reset(self) -> None:
        """Forget everything: an episode begins."""
        self._unlocked, self._of_turn = {}, {}

    def unlock(self, name: str) -> bool:
        """Note that `name` was achieved in this turn; True: for the first time in this episode.

        Raises:
            ContractError: there is no achievement of that name; says the nearest.
        """
        if name not in self.names:
            raise ContractError(f"there is no achievement {name!r}; {nearest_name(name, self.names)}")
        is_new = name not in self._unlocked
        self._unlocked[name] = self._of_turn[name] = None
        return is_new

    def turn_events(self) -> tuple[str, ...]:
        """What was achieved since this was asked last, new or again, each once: the `events` of the turn's reward."""
        events, self._of_turn = tuple(self._of_turn), {}
        return events
