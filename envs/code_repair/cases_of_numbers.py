"""Tests of the library's modules about numbers, dates and codes."""

from __future__ import annotations

from collections.abc import Mapping

from .cases import Call, Cases, Draw, call, choosing

_UNITS = "dhms"


def _day(d: Draw) -> tuple[int, int, int]:
    """A day that exists, often at the end of a month."""
    year, month = d.one_of((1900, 2000, 2023, 2024, 2100)), d.number(1, 12)
    last = (31, 29 if year in (2000, 2024) else 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)[month - 1]
    return year, month, d.one_of((1, last, last - 1, d.number(1, last)))


def _time(d: Draw) -> str:
    return f"{d.number(1, 12)}:{d.number(0, 59):02d} {d.one_of(('am', 'pm'))}"


def _program(d: Draw) -> Call:
    words = [str(d.number(-3, 9)) for _ in range(3)]
    words += [d.one_of(("add", "sub", "mul", "dup", "swap", "drop", "4", "-7")) for _ in range(d.number(0, 6))]
    return call("run", words)


def _ratio(d: Draw) -> list[int]:
    return [d.number(-9, 9), d.number(1, 9)]


OF_NUMBERS: Mapping[str, Cases] = {
    "roman": Cases(
        (
            call("to_roman", 1994),
            call("to_roman", 4),
            call("to_roman", 3999),
            call("to_roman", 0),
            call("to_roman", 4000),
            call("to_roman", 1),
            call("from_roman", "MCMXCIV"),
            call("from_roman", "IX"),
            call("from_roman", "III"),
        ),
        choosing(
            lambda d: call("to_roman", d.number(1, 3999)),
            lambda d: call(
                "from_roman",
                d.one_of(("M", "MM", "CM", "D", "CD", "XC", "L", "XL")) + d.one_of(("IX", "V", "IV", "II")),
            ),
        ),
    ),
    "calendar_days": Cases(
        (
            call("is_leap", 1900),
            call("is_leap", 2000),
            call("is_leap", 2024),
            call("is_leap", 2023),
            call("days_in_month", 2024, 2),
            call("days_in_month", 2023, 2),
            call("day_of_year", 2023, 3, 1),
            call("next_day", 2023, 12, 31),
            call("next_day", 2024, 2, 28),
            call("day_of_year", 2024, 12, 31),
        ),
        choosing(
            lambda d: call("is_leap", d.number(1890, 2110)),
            lambda d: call("days_in_month", d.number(1996, 2004), d.number(1, 12)),
            lambda d: call("day_of_year", *_day(d)),
            lambda d: call("next_day", *_day(d)),
        ),
    ),
    "clock": Cases(
        (
            call("parse", "12:30 am"),
            call("parse", "12:30 pm"),
            call("parse", "1:05 pm"),
            call("show", 545),
            call("show", 1440),
            call("between", "11:00 pm", "1:30 am"),
            call("between", "9:00 am", "9:00 am"),
        ),
        choosing(
            lambda d: call("parse", _time(d)),
            lambda d: call("show", d.number(-100, 3000)),
            lambda d: call("between", _time(d), _time(d)),
        ),
    ),
    "durations": Cases(
        (
            call("parse", "1h30m"),
            call("parse", "2d"),
            call("parse", "5"),
            call("parse", "h"),
            call("parse", "3x"),
            call("show", 5401),
            call("show", 0),
            call("show", 86400),
            call("show", 59),
            call("parse", "1m1s"),
        ),
        choosing(
            lambda d: call("parse", "".join(f"{d.number(0, 70)}{unit}" for unit in _UNITS if d.number(0, 1))),
            lambda d: call("parse", d.text("12dhm", 4)),
            lambda d: call("show", d.one_of((d.number(0, 100), d.number(0, 10_000), d.number(0, 300_000)))),
        ),
    ),
    "primes": Cases(
        (
            call("primes_below", 12),
            call("primes_below", 2),
            call("primes_below", 3),
            call("factors", 60),
            call("factors", 1),
            call("factors", 49),
            call("divisors", 12),
            call("divisors", 1),
        ),
        choosing(
            lambda d: call("primes_below", d.number(0, 60)),
            lambda d: call("factors", d.number(1, 200)),
            lambda d: call("divisors", d.number(1, 60)),
        ),
    ),
    "ratios": Cases(
        (
            call("gcd", 12, -18),
            call("gcd", 0, 5),
            call("reduce", 6, -4),
            call("reduce", 0, 7),
            call("reduce", 1, 0),
            call("add", [1, 2], [1, 3]),
            call("is_less", [1, 3], [1, 2]),
            call("is_less", [1, 2], [2, 4]),
        ),
        choosing(
            lambda d: call("gcd", d.number(-30, 30), d.number(-30, 30)),
            lambda d: call("reduce", d.number(-20, 20), d.one_of((-12, -4, -1, 2, 6, 9))),
            lambda d: call("add", _ratio(d), _ratio(d)),
            lambda d: call("is_less", _ratio(d), _ratio(d)),
        ),
    ),
    "bases": Cases(
        (
            call("to_base", 255, 16),
            call("to_base", -5, 2),
            call("to_base", 0, 7),
            call("to_base", 5, 1),
            call("to_base", 5, 37),
            call("to_base", 35, 36),
            call("from_base", "ff", 16),
            call("from_base", "12", 2),
            call("from_base", "-Z", 36),
            call("to_base", 2, 2),
        ),
        choosing(
            lambda d: call("to_base", d.number(-300, 300), d.number(2, 36)),
            lambda d: call("from_base", d.one_of(("", "-")) + d.text("0123", 5, least=1), d.number(4, 36)),
        ),
    ),
    "stack_machine": Cases(
        (
            call("run", ["2", "3", "add", "dup", "mul"]),
            call("run", ["5", "3", "sub"]),
            call("run", ["1", "2", "swap"]),
            call("run", ["1", "drop"]),
            call("run", ["add"]),
            call("run", ["1", "2", "what"]),
            call("run", ["-4", "3", "mul"]),
        ),
        _program,
    ),
    "knapsack": Cases(
        (
            call("best_value", [[2, 3], [3, 4], [4, 6]], 6),
            call("best_value", [], 3),
            call("best_value", [[2, 5]], 4),
            call("fewest_coins", [1, 5, 12], 15),
            call("fewest_coins", [2], 3),
            call("fewest_coins", [2], 0),
        ),
        choosing(
            lambda d: call(
                "best_value", [[d.number(1, 6), d.number(1, 9)] for _ in range(d.number(1, 5))], d.number(0, 12)
            ),
            lambda d: call("fewest_coins", sorted({d.number(1, 9) for _ in range(3)}), d.number(0, 20)),
        ),
    ),
    "checksums": Cases(
        (
            call("luhn_sum", "18"),
            call("luhn_sum", "59"),
            call("is_card", "4539 3195 0343 6467"),
            call("is_card", "0"),
            call("is_card", "8273 1232 7352 0569"),
            call("is_card", "1a8"),
            call("isbn_digit", "030640615"),
            call("isbn_digit", "080442957"),
            call("isbn_digit", "000000000"),
        ),
        choosing(
            lambda d: call("luhn_sum", d.text("0123456789", 8)),
            lambda d: call(
                "is_card", d.one_of(("18", "1 8", "26", "34", "59", "x8", "00", "5 9", "")) + d.one_of(("", "0"))
            ),
            lambda d: call("isbn_digit", d.text("0123456789", 9, least=9)),
        ),
    ),
}
