"""A second path to the advantages of forked episodes, for `oracle.py`; nothing of `learning/trees.py` is in it.

Here all forks of an episode leave it before the same turn, as `rollout/forks.py` plays them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gspo_gym.types import Trajectory

Floats = NDArray[np.float64]


def forked(
    episodes: Sequence[Trajectory], returns: Floats, unforked: Floats, groups: Sequence[Sequence[int]]
) -> Floats:
    """Return [N, K] weighted advantages of K turns, from the returns [N] of episodes, of which groups are compared.

    With m(T) the mean return of a tree T, which is an episode with its forks from turn k, an episode with return R has

        turns before k  m(T) less the mean of m over the group's other trees
        turn k          R less the mean return of the tree's other episodes
        later turns     R less the mean of m over the group's other trees

    times (episodes of the batch) / (trees of the batch) / (episodes of T). Where `unforked`, the advantages [N, 1] of
    whole episodes, are all 0, so are these.
    """
    table = np.zeros((len(episodes), max((len(episode.turns) for episode in episodes), default=1)))
    fork_turns = {e.forked_from.trajectory_id: e.forked_from.turn for e in episodes if e.forked_from}
    origins = [(e.forked_from or e).trajectory_id for e in episodes]
    num_trees = 0
    for members in groups:
        names = dict.fromkeys(origins[i] for i in members)
        trees = {name: [i for i in members if origins[i] == name] for name in names}
        num_trees += len(trees)
        means = {name: float(returns[tree].mean()) for name, tree in trees.items()}
        for name, tree in trees.items() if unforked[members].any() else ():
            rivals = [mean for other, mean in means.items() if other != name] or [means[name]]
            for i in tree:
                siblings, rival = returns[[j for j in tree if j != i]], np.mean(rivals)
                k = fork_turns[name] if len(siblings) else 0
                own = np.full(len(episodes[i].turns), returns[i] - rival if len(trees) > 1 else 0.0)
                own[:k] = means[name] - rival
                own[k] = returns[i] - siblings.mean() if len(siblings) else own[k]
                table[i, : len(own)] = own / len(tree)
    return table * sum(map(len, groups)) / max(num_trees, 1)
