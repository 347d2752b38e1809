"""Shortest ways through a maze of "." (free) and "#" (wall)."""


def steps(maze: list[str], start: list[int], goal: list[int]) -> int:
    """Fewest steps up, down, left or right between two free cells [row, column]; -1 if there is no way.

    >>> steps(["..", "#."], [0, 0], [1, 1])
    2
    """
    frontier = [(start[0], start[1])]
    seen = {(start[0], start[1])}
    distance = 0
    while frontier:
        if (goal[0], goal[1]) in frontier:
            return distance
        near = [(row + down, column) for row, column in frontier for down in (-1, 1)]
        near += [(row, column + right) for row, column in frontier for right in (-1, 1)]
        frontier = [cell for cell in near if is_free(maze, cell[0], cell[1]) and cell not in seen]
        seen.update(frontier)
        distance += 1
    return -1


def is_free(maze: list[str], row: int, column: int) -> bool:
    """Whether the cell lies in the maze and is no wall.

    >>> is_free([".#"], 0, 1), is_free([".#"], 0, -1)
    (False, False)
    """
    if row < 0 or row >= len(maze):
        return False
    if column < 0 or column >= len(maze[row]):
        return False
    return maze[row][column] == "."
