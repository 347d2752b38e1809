"""Words that read the same backwards."""


def is_palindrome(text: str) -> bool:
    """Counting letters and digits only, small and capital alike.

    >>> is_palindrome("Was it a car?"), is_palindrome("No lemon, no melon")
    (False, True)
    """
    kept = [letter.lower() for letter in text if letter.isalnum()]
    return kept == kept[::-1]


def longest(text: str) -> str:
    """The longest part that is the same backwards, letter by letter; the first of equally long ones.

    >>> longest("xabbay")
    'abba'
    """
    best = ""
    for center in range(len(text)):
        for width in (0, 1):
            left, right = center, center + width
            while left >= 0 and right < len(text) and text[left] == text[right]:
                left -= 1
                right += 1
            found = text[left + 1 : right]
            if len(found) > len(best):
                best = found
    return best
