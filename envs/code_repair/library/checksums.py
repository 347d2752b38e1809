"""Check digits of card and book numbers."""


def luhn_sum(digits: str) -> int:
    """From the right, every second digit doubled, and 9 taken off where that is above 9.

    >>> luhn_sum("18")
    10
    """
    total = 0
    for position, digit in enumerate(reversed(digits)):
        value = int(digit)
        if position % 2 == 1:
            value *= 2
            if value > 9:
                value -= 9
        total += value
    return total


def is_card(number: str) -> bool:
    """Whether the sum of a card's digits is a multiple of 10; spaces do not count, and two digits are the least.

    >>> is_card("4539 3195 0343 6467"), is_card("8273 1232 7352 0569")
    (True, False)
    """
    digits = number.replace(" ", "")
    return digits.isdigit() and len(digits) >= 2 and luhn_sum(digits) % 10 == 0


def isbn_digit(first_nine: str) -> str:
    """The tenth digit of a book's number: weights 10 to 2, a sum that 11 divides, X for 10.

    >>> isbn_digit("030640615"), isbn_digit("080442957")
    ('2', 'X')
    """
    total = sum((10 - index) * int(digit) for index, digit in enumerate(first_nine))
    check = (11 - total % 11) % 11
    return "X" if check == 10 else str(check)
