"""Run-length coding of text without digits."""


def encode(text: str) -> str:
    """Write each run as its letter and its length; the length 1 is left out.

    >>> encode("aaabcc")
    'a3bc2'
    """
    coded = ""
    index = 0
    while index < len(text):
        end = index + 1
        while end < len(text) and text[end] == text[index]:
            end += 1
        length = end - index
        coded += text[index] + (str(length) if length > 1 else "")
        index = end
    return coded


def decode(coded: str) -> str:
    """Undo encode.

    >>> decode("a3bc12")
    'aaabcccccccccccc'
    """
    text = ""
    index = 0
    while index < len(coded):
        end = index + 1
        while end < len(coded) and coded[end].isdigit():
            end += 1
        digits = coded[index + 1 : end]
        text += coded[index] * (int(digits) if digits else 1)
        index = end
    return text
