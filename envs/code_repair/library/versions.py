"""Version numbers such as 1.10.2."""


def parts_of(version: str) -> list[int]:
    """The numbers, without zeros at the end.

    >>> parts_of("1.10.0")
    [1, 10]
    """
    parts = [int(part) for part in version.split(".")]
    while parts and parts[-1] == 0:
        parts.pop()
    return parts


def compare(a: str, b: str) -> int:
    """-1 if a is older than b, 1 if it is newer, 0 if they are the same.

    >>> compare("1.9", "1.10"), compare("2.0", "2")
    (-1, 0)
    """
    left, right = parts_of(a), parts_of(b)
    if left == right:
        return 0
    return -1 if left < right else 1


def newest(versions: list[str], major: int) -> str:
    """The newest with that first number, "" if there is none; of equal ones the first.

    >>> newest(["1.2", "2.0", "1.11"], 1)
    '1.11'
    """
    best = ""
    for version in versions:
        if int(version.split(".")[0]) != major:
            continue
        if not best or compare(version, best) > 0:
            best = version
    return best
