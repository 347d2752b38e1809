"""Intervals of integers, written [start, end], both ends included."""


def merge(intervals: list[list[int]]) -> list[list[int]]:
    """Join intervals that overlap or share an end; sorted by start.

    >>> merge([[5, 7], [1, 3], [3, 4]])
    [[1, 4], [5, 7]]
    """
    merged: list[list[int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def common(a: list[int], b: list[int]) -> list[int]:
    """The part that both cover; [] if there is none.

    >>> common([1, 5], [4, 9])
    [4, 5]
    """
    start = max(a[0], b[0])
    end = min(a[1], b[1])
    return [start, end] if start <= end else []


def covered(intervals: list[list[int]]) -> int:
    """How many integers lie in at least one interval.

    >>> covered([[1, 3], [2, 5], [8, 8]])
    6
    """
    return sum(end - start + 1 for start, end in merge(intervals))
