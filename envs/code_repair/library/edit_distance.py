"""How different two texts are."""


def distance(a: str, b: str) -> int:
    """Fewest letters to insert, delete or replace to make one of the other.

    >>> distance("kitten", "sitting")
    3
    """
    row = list(range(len(b) + 1))
    for i in range(1, len(a) + 1):
        previous = row
        row = [i]
        for j in range(1, len(b) + 1):
            replaced = previous[j - 1] + (0 if a[i - 1] == b[j - 1] else 1)
            row.append(min(replaced, previous[j] + 1, row[j - 1] + 1))
    return row[-1]


def common_prefix(words: list[str]) -> str:
    """The longest beginning that all words share; "" for no words.

    >>> common_prefix(["flower", "flow", "flight"])
    'fl'
    """
    if not words:
        return ""
    prefix = words[0]
    for word in words[1:]:
        while not word.startswith(prefix):
            prefix = prefix[:-1]
    return prefix
