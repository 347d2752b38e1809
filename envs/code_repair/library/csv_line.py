"""One line of comma-separated values."""


def split_line(line: str) -> list[str]:
    """The cells; between quotes a comma is text and two quotes are one.

    >>> split_line('a,"b, c",')
    ['a', 'b, c', '']
    """
    cells: list[str] = []
    cell = ""
    is_quoted = False
    index = 0
    while index < len(line):
        letter = line[index]
        if letter == '"' and is_quoted and line[index + 1 : index + 2] == '"':
            cell += '"'
            index += 1
        elif letter == '"':
            is_quoted = not is_quoted
        elif letter == "," and not is_quoted:
            cells.append(cell)
            cell = ""
        else:
            cell += letter
        index += 1
    cells.append(cell)
    return cells


def join_line(cells: list[str]) -> str:
    """Undo split_line, with quotes only where they are needed.

    >>> join_line(["a", "b, c"])
    'a,"b, c"'
    """
    written = []
    for cell in cells:
        if "," in cell or '"' in cell:
            cell = '"' + cell.replace('"', '""') + '"'
        written.append(cell)
    return ",".join(written)
