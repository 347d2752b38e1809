"""Choosing the best under a limit."""


def best_value(items: list[list[int]], capacity: int) -> int:
    """The largest total value of items [weight, value], each taken at most once, that are not too heavy together.

    >>> best_value([[2, 3], [3, 4], [4, 6]], 6)
    9
    """
    best = [0] * (capacity + 1)
    for weight, value in items:
        for room in range(capacity, weight - 1, -1):
            best[room] = max(best[room], best[room - weight] + value)
    return best[capacity]


def fewest_coins(coins: list[int], amount: int) -> int:
    """How few coins make the amount, each kind as often as needed; -1 if none do.

    >>> fewest_coins([1, 5, 12], 15)
    3
    """
    fewest = [0] + [-1] * amount
    for total in range(1, amount + 1):
        counts = [fewest[total - coin] + 1 for coin in coins if coin <= total and fewest[total - coin] >= 0]
        if counts:
            fewest[total] = min(counts)
    return fewest[amount]
