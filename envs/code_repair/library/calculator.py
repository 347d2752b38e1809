"""Arithmetic on integers: + - * / (rounding down) and parentheses."""


def tokens_of(text: str) -> list[str]:
    """Numbers, operators and parentheses.

    >>> tokens_of("12*(3 - 4)")
    ['12', '*', '(', '3', '-', '4', ')']
    """
    tokens: list[str] = []
    number = ""
    for letter in text + " ":
        if letter.isdigit():
            number += letter
            continue
        if number:
            tokens.append(number)
            number = ""
        if letter != " ":
            tokens.append(letter)
    return tokens


def evaluate(text: str) -> int:
    """The value of an expression; * and / bind tighter, equals go from left to right.

    >>> evaluate("2 + 3 * (7 - 4) / 2")
    6
    """
    value, rest = _sum(tokens_of(text))
    if rest:
        raise ValueError(rest[0])
    return value


def _sum(tokens: list[str]) -> tuple[int, list[str]]:
    value, tokens = _product(tokens)
    while tokens and tokens[0] in "+-":
        operator = tokens[0]
        other, tokens = _product(tokens[1:])
        value = value + other if operator == "+" else value - other
    return value, tokens


def _product(tokens: list[str]) -> tuple[int, list[str]]:
    value, tokens = _atom(tokens)
    while tokens and tokens[0] in "*/":
        operator = tokens[0]
        other, tokens = _atom(tokens[1:])
        value = value * other if operator == "*" else value // other
    return value, tokens


def _atom(tokens: list[str]) -> tuple[int, list[str]]:
    if tokens[0] == "(":
        value, rest = _sum(tokens[1:])
        return value, rest[1:]
    return int(tokens[0]), tokens[1:]
