"""A machine with a stack of integers."""


def run(program: list[str]) -> list[int]:
    """The stack after a program of numbers and the words add sub mul dup swap drop.

    ValueError for an unknown word, IndexError if the stack is too short.

    >>> run(["2", "3", "add", "dup", "mul"])
    [25]
    """
    stack: list[int] = []
    for word in program:
        if word.lstrip("-").isdigit():
            stack.append(int(word))
        elif word == "dup":
            stack.append(stack[-1])
        elif word == "drop":
            stack.pop()
        elif word == "swap":
            stack[-1], stack[-2] = stack[-2], stack[-1]
        else:
            right = stack.pop()
            left = stack.pop()
            stack.append(apply(word, left, right))
    return stack


def apply(word: str, left: int, right: int) -> int:
    """One operation on two numbers.

    >>> apply("sub", 5, 3)
    2
    """
    if word == "add":
        return left + right
    if word == "sub":
        return left - right
    if word == "mul":
        return left * right
    raise ValueError(word)
