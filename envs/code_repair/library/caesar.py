"""Ciphers on the letters A-Z and a-z; all else stays as it is."""


def shift_letter(letter: str, shift: int) -> str:
    """One letter moved on in its alphabet, from the end to the beginning.

    >>> shift_letter("z", 2), shift_letter("A", -1), shift_letter("!", 3)
    ('b', 'Z', '!')
    """
    if "a" <= letter <= "z":
        return chr((ord(letter) - ord("a") + shift) % 26 + ord("a"))
    if "A" <= letter <= "Z":
        return chr((ord(letter) - ord("A") + shift) % 26 + ord("A"))
    return letter


def caesar(text: str, shift: int) -> str:
    """Every letter moved by the same shift.

    >>> caesar("Hi, zoo", 1)
    'Ij, app'
    """
    return "".join(shift_letter(letter, shift) for letter in text)


def vigenere(text: str, key: str) -> str:
    """Letters moved by the key's small letters in turn, "a" by 0; what is no letter uses up none of the key.

    >>> vigenere("to be", "ab")
    'tp bf'
    """
    coded = ""
    used = 0
    for letter in text:
        coded += shift_letter(letter, ord(key[used % len(key)]) - ord("a"))
        if letter.isalpha():
            used += 1
    return coded
