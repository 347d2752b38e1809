"""Brackets of three kinds in a text."""

PAIRS = {")": "(", "]": "[", "}": "{"}


def is_balanced(text: str) -> bool:
    """Whether every bracket is closed by its own kind in the right order.

    >>> is_balanced("f(a[1])"), is_balanced("([)]")
    (True, False)
    """
    opened: list[str] = []
    for letter in text:
        if letter in PAIRS.values():
            opened.append(letter)
        elif letter in PAIRS:
            if not opened or opened[-1] != PAIRS[letter]:
                return False
            opened.pop()
    return not opened


def deepest(text: str) -> int:
    """The most brackets that are open at once.

    >>> deepest("a(b[c]d){}")
    2
    """
    depth = most = 0
    for letter in text:
        if letter in PAIRS.values():
            depth += 1
            most = max(most, depth)
        elif letter in PAIRS:
            depth -= 1
    return most
