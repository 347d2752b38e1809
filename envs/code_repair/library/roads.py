"""Cheapest ways over one-way roads [from, to, cost], costs >= 0."""

import heapq


def cheapest(roads: list[list[int]], start: int, goal: int) -> int:
    """The cost of the cheapest way; -1 if there is none.

    >>> cheapest([[1, 2, 5], [1, 3, 1], [3, 2, 2]], 1, 2)
    3
    """
    best: dict[int, int] = {}
    heap = [(0, start)]
    while heap:
        cost, town = heapq.heappop(heap)
        if town in best:
            continue
        best[town] = cost
        for source, target, price in roads:
            if source == town and target not in best:
                heapq.heappush(heap, (cost + price, target))
    return best.get(goal, -1)


def reachable(roads: list[list[int]], start: int) -> list[int]:
    """The towns that can be reached, the start included, sorted.

    >>> reachable([[1, 2, 5], [3, 1, 1]], 1)
    [1, 2]
    """
    found = [start]
    for town in found:
        for source, target, _ in roads:
            if source == town and target not in found:
                found.append(target)
    return sorted(found)
