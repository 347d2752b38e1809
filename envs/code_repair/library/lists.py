"""Cutting and joining lists."""


def chunks(items: list[int], size: int) -> list[list[int]]:
    """Pieces of `size`, the last one maybe shorter; ValueError if size < 1.

    >>> chunks([1, 2, 3, 4, 5], 2)
    [[1, 2], [3, 4], [5]]
    """
    if size < 1:
        raise ValueError(size)
    return [items[start : start + size] for start in range(0, len(items), size)]


def rotate(items: list[int], steps: int) -> list[int]:
    """Moved to the right, from the end to the beginning; to the left if negative.

    >>> rotate([1, 2, 3, 4], 1)
    [4, 1, 2, 3]
    """
    if not items:
        return []
    cut = len(items) - steps % len(items)
    return items[cut:] + items[:cut]


def unique(items: list[int]) -> list[int]:
    """Each number once, in the order of first appearance.

    >>> unique([3, 1, 3, 2, 1])
    [3, 1, 2]
    """
    seen: list[int] = []
    for item in items:
        if item not in seen:
            seen.append(item)
    return seen


def pairs_with_sum(items: list[int], total: int) -> int:
    """How many pairs of positions hold numbers that add up to the total.

    >>> pairs_with_sum([1, 3, 2, 2], 4)
    2
    """
    count = 0
    for i, first in enumerate(items):
        for second in items[i + 1 :]:
            if first + second == total:
                count += 1
    return count
