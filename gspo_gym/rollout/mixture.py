"""Which environment a group plays, where a run has several: decided by the group's number and the shares alone.

So a resumed run and a pipelined one play what an uninterrupted one plays, and every batch holds every environment in
about its share. Called by the trainer; who plays a group of which environment is decided in `build_apps.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fractions import Fraction

from gspo_gym.errors import ConfigError, nearest_name
from gspo_gym.rollout.episode import EpisodeRequest, PlayEpisode
from gspo_gym.types import Trajectory


class Mixture:
    """Allots groups to environments.

    Group after group goes to the environment that is furthest behind its share, the earlier one of equals. So none is
    ever a whole group ahead of it, and after any number of groups that gives each a whole number, each has exactly that
    (the smooth weighted round robin of load balancers, which spreads each server's requests evenly).

    Args:
        env_id: the main environment, which gets what the others leave.
        others: the fraction of groups that each further environment gets.

    Raises:
        ConfigError: the fractions leave nothing for the main one, or one is not above 0.

    >>> mixture = Mixture("a", {"b": 0.25})
    >>> [mixture.env_of(number) for number in range(8)]
    ['a', 'a', 'b', 'a', 'a', 'a', 'b', 'a']
    """

    def __init__(self, env_id: str, others: Mapping[str, float]) -> None:
        if sum(others.values()) >= 1 or any(share <= 0 for share in others.values()) or env_id in others:
            raise ConfigError(
                f"mixture: expected fractions > 0 of other environments than {env_id!r}, below 1 in sum, got "
                f"{dict(others)}"
            )
        shares = {name: Fraction(str(share)) for name, share in others.items()}  # 0.1 is a tenth, so that ties are ties
        self._shares = {env_id: 1 - sum(shares.values()), **shares}
        self._counts: Counter[str] = Counter()
        self._allotted: list[str] = []

    def env_of(self, number: int) -> str:
        """The environment of the group with that number, from 0."""
        while len(self._allotted) <= number:
            num_groups = len(self._allotted) + 1
            behind = {name: num_groups * share - self._counts[name] for name, share in self._shares.items()}
            chosen = max(behind, key=behind.__getitem__)
            self._counts[chosen] += 1
            self._allotted.append(chosen)
        return self._allotted[number]


def play_by_environment(players: Mapping[str, PlayEpisode]) -> PlayEpisode:
    """Plays each episode with the player of its environment; `players` are by environment id."""
    if len(players) == 1:
        return next(iter(players.values()))

    async def play(request: EpisodeRequest) -> Trajectory:
        env_id = request.task.env_id
        if env_id not in players:
            raise ConfigError(f"nobody here plays {env_id!r}; {nearest_name(env_id, players)}")
        return await players[env_id](request)

    return play
