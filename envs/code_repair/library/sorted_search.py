"""Binary search in sorted lists."""


def first_at_least(numbers: list[int], bound: int) -> int:
    """The first index whose number is >= bound; the length if there is none.

    >>> first_at_least([1, 3, 3, 7], 3)
    1
    """
    low, high = 0, len(numbers)
    while low < high:
        middle = (low + high) // 2
        if numbers[middle] < bound:
            low = middle + 1
        else:
            high = middle
    return low


def count_between(numbers: list[int], low: int, high: int) -> int:
    """How many numbers n have low <= n <= high.

    >>> count_between([1, 3, 3, 7], 3, 6)
    2
    """
    return max(0, first_at_least(numbers, high + 1) - first_at_least(numbers, low))


def nearest(numbers: list[int], target: int) -> int:
    """The number closest to the target, of two equally close ones the smaller; the list is not empty.

    >>> nearest([1, 4, 9], 6)
    4
    """
    index = first_at_least(numbers, target)
    if index == 0:
        return numbers[0]
    if index == len(numbers):
        return numbers[-1]
    below, above = numbers[index - 1], numbers[index]
    return below if target - below <= above - target else above
