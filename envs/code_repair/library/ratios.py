"""Fractions as [numerator, denominator] in lowest terms, the denominator > 0."""


def gcd(a: int, b: int) -> int:
    """The greatest common divisor, >= 0.

    >>> gcd(12, -18)
    6
    """
    while b:
        a, b = b, a % b
    return abs(a)


def reduce(numerator: int, denominator: int) -> list[int]:
    """In lowest terms; ZeroDivisionError for a denominator of 0.

    >>> reduce(6, -4)
    [-3, 2]
    """
    if denominator == 0:
        raise ZeroDivisionError("denominator")
    divisor = gcd(numerator, denominator)
    if denominator < 0:
        divisor = -divisor
    return [numerator // divisor, denominator // divisor]


def add(a: list[int], b: list[int]) -> list[int]:
    """The sum.

    >>> add([1, 2], [1, 3])
    [5, 6]
    """
    return reduce(a[0] * b[1] + b[0] * a[1], a[1] * b[1])


def is_less(a: list[int], b: list[int]) -> bool:
    """Whether a < b.

    >>> is_less([1, 3], [1, 2])
    True
    """
    return a[0] * b[1] < b[0] * a[1]
