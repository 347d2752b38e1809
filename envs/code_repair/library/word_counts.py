"""Words and how often they come."""


def words_of(text: str) -> list[str]:
    """Runs of letters, in small letters.

    >>> words_of("It's 2 late, LATE")
    ['it', 's', 'late', 'late']
    """
    words: list[str] = []
    word = ""
    for letter in text.lower() + " ":
        if letter.isalpha():
            word += letter
        elif word:
            words.append(word)
            word = ""
    return words


def most_common(text: str, count: int) -> list[str]:
    """The most frequent words, equally frequent ones by the alphabet.

    >>> most_common("b a b c a d", 3)
    ['a', 'b', 'c']
    """
    counts: dict[str, int] = {}
    for word in words_of(text):
        counts[word] = counts.get(word, 0) + 1
    return sorted(counts, key=lambda word: (-counts[word], word))[:count]


def anagrams(words: list[str]) -> list[list[str]]:
    """The groups of two or more words of the same letters, in the order of their first words.

    >>> anagrams(["tea", "pot", "eat", "top", "cup"])
    [['tea', 'eat'], ['pot', 'top']]
    """
    groups: dict[str, list[str]] = {}
    for word in words:
        groups.setdefault("".join(sorted(word)), []).append(word)
    return [group for group in groups.values() if len(group) >= 2]
