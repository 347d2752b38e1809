"""Conway's game of life on a field of "x" (alive) and "." (dead) that ends at its borders."""


def neighbours(field: list[str], row: int, column: int) -> int:
    """How many of the up to eight cells around are alive.

    >>> neighbours(["xx", "x."], 0, 0)
    2
    """
    count = 0
    for r in range(max(0, row - 1), min(len(field), row + 2)):
        for c in range(max(0, column - 1), min(len(field[r]), column + 2)):
            if (r, c) != (row, column) and field[r][c] == "x":
                count += 1
    return count


def step(field: list[str]) -> list[str]:
    """The next field: alive are cells with 3 living neighbours, and living ones with 2.

    >>> step(["...", "xxx", "..."])
    ['.x.', '.x.', '.x.']
    """
    following = []
    for row in range(len(field)):
        line = ""
        for column in range(len(field[row])):
            around = neighbours(field, row, column)
            is_alive = around == 3 or (around == 2 and field[row][column] == "x")
            line += "x" if is_alive else "."
        following.append(line)
    return following
