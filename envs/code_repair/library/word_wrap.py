"""Breaking text into lines."""


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width` letters, as many words in each as fit; a longer word has a line of its own.

    >>> wrap("the quick brown fox", 9)
    ['the quick', 'brown fox']
    """
    lines: list[str] = []
    line = ""
    for word in text.split():
        if line and len(line) + 1 + len(word) <= width:
            line += " " + word
        else:
            if line:
                lines.append(line)
            line = word
    if line:
        lines.append(line)
    return lines


def center(text: str, width: int) -> str:
    """Spaces on both sides up to the width; an odd one goes to the right.

    >>> center("ab", 5)
    ' ab  '
    """
    room = max(0, width - len(text))
    left = room // 2
    return " " * left + text + " " * (room - left)
