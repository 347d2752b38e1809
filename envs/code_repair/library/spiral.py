"""Walking through a matrix from the outside in."""


def spiral(matrix: list[list[int]]) -> list[int]:
    """All cells clockwise, from the first one inwards.

    >>> spiral([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    [1, 2, 3, 6, 9, 8, 7, 4, 5]
    """
    top, bottom = 0, len(matrix) - 1
    left, right = 0, len(matrix[0]) - 1
    cells: list[int] = []
    while top <= bottom and left <= right:
        cells += matrix[top][left : right + 1]
        cells += [matrix[row][right] for row in range(top + 1, bottom + 1)]
        if top < bottom:
            cells += [matrix[bottom][column] for column in range(right - 1, left - 1, -1)]
        if left < right:
            cells += [matrix[row][left] for row in range(bottom - 1, top, -1)]
        top += 1
        bottom -= 1
        left += 1
        right -= 1
    return cells


def rotate(matrix: list[list[int]]) -> list[list[int]]:
    """Turned clockwise by a quarter.

    >>> rotate([[1, 2], [3, 4]])
    [[3, 1], [4, 2]]
    """
    height = len(matrix)
    return [[matrix[height - 1 - row][column] for row in range(height)] for column in range(len(matrix[0]))]
