"""Days of the Gregorian calendar."""

LENGTHS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]


def is_leap(year: int) -> bool:
    """Every fourth year, but of the full centuries only every fourth.

    >>> is_leap(1900), is_leap(2000), is_leap(2024)
    (False, True, True)
    """
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def days_in_month(year: int, month: int) -> int:
    """The length of a month, 1 to 12.

    >>> days_in_month(2024, 2)
    29
    """
    if month == 2 and is_leap(year):
        return 29
    return LENGTHS[month - 1]


def day_of_year(year: int, month: int, day: int) -> int:
    """1 for the first of January.

    >>> day_of_year(2023, 3, 1)
    60
    """
    return sum(days_in_month(year, earlier) for earlier in range(1, month)) + day


def next_day(year: int, month: int, day: int) -> list[int]:
    """The day after, as [year, month, day].

    >>> next_day(2023, 12, 31)
    [2024, 1, 1]
    """
    if day < days_in_month(year, month):
        return [year, month, day + 1]
    if month < 12:
        return [year, month + 1, 1]
    return [year + 1, 1, 1]
