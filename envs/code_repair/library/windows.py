"""Looking at a list through a window of some neighbours."""


def window_sums(numbers: list[int], size: int) -> list[int]:
    """The sum of every `size` neighbours; [] if there are fewer; ValueError if size < 1.

    >>> window_sums([1, 2, 3, 4], 2)
    [3, 5, 7]
    """
    if size < 1:
        raise ValueError(size)
    return [sum(numbers[i : i + size]) for i in range(len(numbers) - size + 1)]


def best_run(numbers: list[int]) -> int:
    """The largest sum of one or more neighbours; 0 for an empty list.

    >>> best_run([2, -1, 3, -9, 4])
    4
    """
    if not numbers:
        return 0
    best = current = numbers[0]
    for number in numbers[1:]:
        current = max(number, current + number)
        best = max(best, current)
    return best


def longest_rise(numbers: list[int]) -> int:
    """The length of the longest run of neighbours in which each is larger than the one before.

    >>> longest_rise([1, 3, 2, 4, 5, 5])
    3
    """
    longest = length = 0
    for index, number in enumerate(numbers):
        if index > 0 and number > numbers[index - 1]:
            length += 1
        else:
            length = 1
        longest = max(longest, length)
    return longest
