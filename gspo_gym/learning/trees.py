"""Returns of episodes of which some are forks of others -> one advantage per turn, by comparing siblings.

Episodes that share turns are a tree: a node is a turn with what came before it, the root is the task, and the leaves
are episodes. `rollout/forks.py` plays them. Not for episodes without forks (`advantages.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from gspo_gym.learning.credit import Returns
from gspo_gym.types import Float32Array, Trajectory

Node = tuple[str, int]  # the episode that played a turn first, and its number; -1: the root of the tree


def tree_advantages(
    groups: Sequence[Sequence[Trajectory]],
    returns: Sequence[Sequence[Returns]],
    constant_groups: Sequence[bool],
) -> tuple[Float32Array, ...]:
    """Return [num_turns] advantages of each episode of groups, group after group; 0 in constant groups.

    With V(leaf) = its return and V(node) = the mean of V over its children, the turn that leads to node c has

        A(c) = V(c) - mean of V over the siblings of c          if c has siblings, else
        A(c) = V(c) - mean of V over the roots of other trees   (0 if there are none)

    as Tree-GRPO compares inside and between trees (arXiv 2509.21240), but each turn in one way, unscaled, and leaving
    the turn's own out: in the sum of both, a turn with siblings would count its return twice, and a mean that includes
    it would shrink the gradient. Without forks it is the leave-one-out advantage of the episode.

    An episode's advantages are multiplied by its weight, 1 / (leaves of its tree), of mean 1 over the batch: a tree
    weighs as one episode, and a shared turn, which every leaf below it holds, as much as all of them.

    Args:
        groups: a task's episodes each; `Trajectory.forked_from` says which turns they share.
        returns, constant_groups: of the same episodes and groups, see `BatchAdvantages`.
    """
    paths = [_paths(group) for group in groups]
    sizes = [Counter(path[0] for path in own) for own in paths]  # leaves of each tree
    mean_size = sum(map(len, groups)) / sum(map(len, sizes))
    advantages: list[Float32Array] = []
    for own, size, of_group, is_constant in zip(paths, sizes, returns, constant_groups, strict=True):
        by_node: Mapping[Node, float] = {}
        if not is_constant:
            by_node = node_advantages(zip(own, (r.episode_return for r in of_group), strict=True))
        for root, *turns in own:
            values = [by_node.get(turn, 0.0) * mean_size / size[root] for turn in turns]
            advantages.append(np.array(values, dtype=np.float32))
    return tuple(advantages)


def node_advantages(leaves: Iterable[tuple[Sequence[Node], float]]) -> Mapping[Node, float]:
    """Return A of every node but the roots, unweighted, from each leaf's path (the root first) and its return.

    >>> x, y, root = ("a", 0), ("c", 0), ("a", -1)
    >>> paths = (root, x, ("a", 1)), (root, x, ("b", 1)), (root, y)
    >>> node_advantages(zip(paths, (1.0, 0.0, 1.0)))
    {('a', 0): -0.5, ('c', 0): 0.5, ('a', 1): 1.0, ('b', 1): -1.0}
    """
    children: dict[Node, dict[Node, None]] = {}  # in order, each once
    values: dict[Node, float] = {}
    for path, episode_return in leaves:
        for parent, child in pairwise(path):
            children.setdefault(parent, {})[child] = None
        values[path[-1]] = episode_return  # the last turn is of this episode alone
    for node in sorted(children, key=lambda node: -node[1]):  # the deepest first
        values[node] = float(np.mean([values[child] for child in children[node]]))
    roots = [node for node in children if node[1] < 0]
    root_of: dict[Node, Node] = {root: root for root in roots}
    advantages: dict[Node, float] = {}
    for node in sorted(children, key=lambda node: node[1]):
        for child in children[node]:
            root_of[child] = root_of[node]
            siblings = [other for other in children[node] if other != child]
            rivals = siblings or [root for root in roots if root != root_of[child]]
            baseline = np.mean([values[other] for other in rivals]) if rivals else values[child]
            advantages[child] = values[child] - float(baseline)
    return advantages


def _paths(group: Sequence[Trajectory]) -> list[tuple[Node, ...]]:
    by_id = {trajectory.trajectory_id: trajectory for trajectory in group}
    return [_path(trajectory, by_id) for trajectory in group]


def _path(trajectory: Trajectory, by_id: Mapping[str, Trajectory]) -> tuple[Node, ...]:
    """Return the root and the turns of an episode; its origins name the turns that it repeated."""
    owners = [trajectory.trajectory_id] * len(trajectory.turns)
    root, num_shared = trajectory.trajectory_id, len(owners)
    origin: Trajectory | None = trajectory
    # An origin that is not in the group any more, because it was left out, still names the turns of its forks.
    while origin is not None and (point := origin.forked_from) is not None:
        root, num_shared = point.trajectory_id, min(num_shared, point.turn)
        owners[:num_shared] = [root] * num_shared
        origin = by_id.get(root)
    return ((root, -1), *((owner, turn) for turn, owner in enumerate(owners)))
