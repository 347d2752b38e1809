"""Numbers in other bases, 2 to 36."""

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def to_base(number: int, base: int) -> str:
    """Write a number; ValueError for a base outside 2 to 36.

    >>> to_base(255, 16), to_base(-5, 2), to_base(0, 7)
    ('ff', '-101', '0')
    """
    if base < 2 or base > 36:
        raise ValueError(base)
    if number == 0:
        return "0"
    text = ""
    rest = abs(number)
    while rest > 0:
        text = DIGITS[rest % base] + text
        rest //= base
    return "-" + text if number < 0 else text


def from_base(text: str, base: int) -> int:
    """Read a number; ValueError for a digit that the base does not have.

    >>> from_base("ff", 16)
    255
    """
    sign = -1 if text.startswith("-") else 1
    value = 0
    for letter in text.removeprefix("-").lower():
        digit = DIGITS.index(letter)
        if digit >= base:
            raise ValueError(letter)
        value = value * base + digit
    return sign * value
