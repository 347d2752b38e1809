"""Lengths of time in words and seconds."""

UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def parse(text: str) -> int:
    """Seconds of a text such as "1h30m"; ValueError for an unknown unit or a number without one.

    >>> parse("1h30m")
    5400
    """
    total = 0
    number = ""
    for letter in text:
        if letter.isdigit():
            number += letter
        elif letter in UNITS and number:
            total += int(number) * UNITS[letter]
            number = ""
        else:
            raise ValueError(text)
    if number:
        raise ValueError(text)
    return total


def show(seconds: int) -> str:
    """The largest units first, without zeros; "0s" for none.

    >>> show(5401)
    '1h30m1s'
    """
    text = ""
    for unit, size in UNITS.items():
        count = seconds // size
        if count > 0:
            text += f"{count}{unit}"
        seconds -= count * size
    return text or "0s"
