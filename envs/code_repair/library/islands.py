"""Groups of connected things."""


def count_groups(size: int, links: list[list[int]]) -> int:
    """How many groups the things 0 to size - 1 form, if linked ones belong together.

    >>> count_groups(4, [[0, 1], [2, 3], [1, 0]])
    2
    """
    parents = list(range(size))
    groups = size
    for a, b in links:
        root_a, root_b = root(parents, a), root(parents, b)
        if root_a != root_b:
            parents[root_a] = root_b
            groups -= 1
    return groups


def root(parents: list[int], thing: int) -> int:
    """The thing at the end of the chain of parents; one that is its own parent ends it.

    >>> root([1, 2, 2], 0)
    2
    """
    while parents[thing] != thing:
        thing = parents[thing]
    return thing


def largest_island(map_rows: list[str]) -> int:
    """The most "x" cells that touch each other by their sides.

    >>> largest_island(["xx.", "..x", "..x"])
    2
    """
    land = {(r, c) for r, row in enumerate(map_rows) for c, cell in enumerate(row) if cell == "x"}
    largest = 0
    while land:
        island = [land.pop()]
        for r, c in island:
            touching = land.intersection([(r + 1, c), (r - 1, c), (r, c + 1), (r, c - 1)])
            land -= touching
            island.extend(touching)
        largest = max(largest, len(island))
    return largest
