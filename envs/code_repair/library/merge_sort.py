"""Sorting by merging."""


def merge(a: list[int], b: list[int]) -> list[int]:
    """One sorted list of two.

    >>> merge([1, 4], [2, 4, 6])
    [1, 2, 4, 4, 6]
    """
    merged: list[int] = []
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i] <= b[j]:
            merged.append(a[i])
            i += 1
        else:
            merged.append(b[j])
            j += 1
    return merged + a[i:] + b[j:]


def merge_sort(numbers: list[int]) -> list[int]:
    """The numbers in order.

    >>> merge_sort([3, 1, 2])
    [1, 2, 3]
    """
    if len(numbers) <= 1:
        return list(numbers)
    middle = len(numbers) // 2
    return merge(merge_sort(numbers[:middle]), merge_sort(numbers[middle:]))


def inversions(numbers: list[int]) -> int:
    """How many pairs stand in the wrong order.

    >>> inversions([3, 1, 2])
    2
    """
    count = 0
    for i in range(len(numbers)):
        for j in range(i + 1, len(numbers)):
            if numbers[i] > numbers[j]:
                count += 1
    return count
