"""Matrices as lists of rows."""


def transpose(matrix: list[list[int]]) -> list[list[int]]:
    """Rows become columns.

    >>> transpose([[1, 2, 3], [4, 5, 6]])
    [[1, 4], [2, 5], [3, 6]]
    """
    return [[row[column] for row in matrix] for column in range(len(matrix[0]))]


def multiply(a: list[list[int]], b: list[list[int]]) -> list[list[int]]:
    """The product; ValueError if the sizes do not fit.

    >>> multiply([[1, 2], [3, 4]], [[0, 1], [1, 0]])
    [[2, 1], [4, 3]]
    """
    if len(a[0]) != len(b):
        raise ValueError("sizes do not fit")
    product = [[0] * len(b[0]) for _ in a]
    for i in range(len(a)):
        for j in range(len(b[0])):
            for k in range(len(b)):
                product[i][j] += a[i][k] * b[k][j]
    return product


def determinant(matrix: list[list[int]]) -> int:
    """Of a square matrix, by its first row.

    >>> determinant([[1, 2], [3, 4]])
    -2
    """
    if len(matrix) == 1:
        return matrix[0][0]
    total = 0
    for column, value in enumerate(matrix[0]):
        minor = [row[:column] + row[column + 1 :] for row in matrix[1:]]
        sign = -1 if column % 2 == 1 else 1
        total += sign * value * determinant(minor)
    return total
