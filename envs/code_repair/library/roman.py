"""Roman numerals from 1 to 3999."""

LETTERS = [("M", 1000), ("CM", 900), ("D", 500), ("CD", 400), ("C", 100), ("XC", 90)]
LETTERS += [("L", 50), ("XL", 40), ("X", 10), ("IX", 9), ("V", 5), ("IV", 4), ("I", 1)]


def to_roman(number: int) -> str:
    """Write a number; ValueError outside 1 to 3999.

    >>> to_roman(1994)
    'MCMXCIV'
    """
    if number < 1 or number > 3999:
        raise ValueError(number)
    text = ""
    for letters, value in LETTERS:
        while number >= value:
            text += letters
            number -= value
    return text


def from_roman(text: str) -> int:
    """Read a numeral; a smaller letter before a larger one is subtracted.

    >>> from_roman("MCMXCIV")
    1994
    """
    values = {letters: value for letters, value in LETTERS if len(letters) == 1}
    total = 0
    for index, letter in enumerate(text):
        value = values[letter]
        if index + 1 < len(text) and value < values[text[index + 1]]:
            total -= value
        else:
            total += value
    return total
