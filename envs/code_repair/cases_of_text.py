"""Tests of the library's modules about text."""

from __future__ import annotations

from collections.abc import Mapping

from .cases import Call, Cases, Draw, call, choosing

_WORDS = ("tea", "eat", "ate", "pot", "top", "cup", "a", "b", "it", "late", "tale", "teal", "Cup")


def _sentence(d: Draw) -> str:
    space: str = d.one_of((" ", ", ", "  "))
    return space.join(d.one_of(_WORDS) for _ in range(d.number(0, 9)))


def _cell(d: Draw) -> str:
    return d.text('ab ,"', 4)


def _quoted(d: Draw) -> str:
    return ",".join('"' + _cell(d).replace('"', '""') + '"' if d.number(0, 1) else d.text("xyz", 3) for _ in range(4))


def _key(d: Draw) -> Call:
    return call("vigenere", d.text("abYZ !", 8), d.text("abcz", 3, least=1))


def _prefixed(d: Draw) -> Call:
    stem = d.text("ab", 4)
    return call("common_prefix", [stem + d.text("ab", 3) for _ in range(d.number(0, 4))])


OF_TEXT: Mapping[str, Cases] = {
    "run_length": Cases(
        (
            call("encode", ""),
            call("encode", "aab"),
            call("encode", "abbb"),
            call("decode", "a3bc12"),
            call("decode", ""),
        ),
        choosing(
            lambda d: call("encode", "".join(d.one_of("abc") * d.number(1, 12) for _ in range(d.number(1, 5)))),
            lambda d: call("decode", "".join(d.one_of("abc") + d.one_of(("", "2", "13")) for _ in range(4))),
        ),
    ),
    "caesar": Cases(
        (
            call("caesar", "xyz ABC", 3),
            call("caesar", "Zz", -1),
            call("shift_letter", "?", 5),
            call("vigenere", "a-b", "bc"),
        ),
        choosing(
            lambda d: call("caesar", d.text("aAmMzZ .5", 8), d.number(-30, 60)),
            lambda d: call("shift_letter", d.one_of("aAmMzZ@[`{"), d.number(-30, 30)),
            _key,
        ),
    ),
    "palindromes": Cases(
        (
            call("is_palindrome", ""),
            call("is_palindrome", "No lemon, no melon"),
            call("is_palindrome", "ab"),
            call("longest", "xabbay"),
            call("longest", "abcba"),
            call("longest", ""),
            call("longest", "ab"),
        ),
        choosing(
            lambda d: call("longest", d.text("aab", 10)),
            lambda d: call("is_palindrome", (half := d.text("aB1, ", 4)) + d.one_of("x ,") + half[::-1].swapcase()),
            lambda d: call("is_palindrome", d.text("aA b", 4)),
        ),
    ),
    "brackets": Cases(
        (
            call("is_balanced", "f(a[1])"),
            call("is_balanced", "([)]"),
            call("is_balanced", "("),
            call("is_balanced", ")"),
            call("deepest", "a(b[c]d){}"),
            call("deepest", "()()"),
            call("deepest", ""),
        ),
        choosing(
            lambda d: call("is_balanced", d.text("()[]", 6)),
            lambda d: call(
                "is_balanced", (opened := d.text("([{", 4)) + opened[::-1].translate(str.maketrans("([{", ")]}"))
            ),
            lambda d: call("deepest", d.text("([{x)]}", 9)),
        ),
    ),
    "word_counts": Cases(
        (
            call("words_of", "It's 2 late, LATE"),
            call("most_common", "b a b c a d", 3),
            call("words_of", ""),
            call("most_common", "z z a", 1),
            call("anagrams", ["tea", "pot", "eat", "top", "cup"]),
        ),
        choosing(
            lambda d: call("words_of", d.text("aB c'2", 10)),
            lambda d: call("most_common", _sentence(d), d.number(0, 4)),
            lambda d: call("anagrams", [d.one_of(_WORDS) for _ in range(d.number(0, 6))]),
        ),
    ),
    "edit_distance": Cases(
        (
            call("distance", "kitten", "sitting"),
            call("distance", "", "ab"),
            call("distance", "ab", ""),
            call("common_prefix", ["flower", "flow", "flight"]),
            call("common_prefix", []),
            call("common_prefix", ["a"]),
        ),
        choosing(lambda d: call("distance", d.text("abc", 6), d.text("abc", 6)), _prefixed),
    ),
    "word_wrap": Cases(
        (
            call("wrap", "the quick brown fox", 9),
            call("wrap", "", 5),
            call("wrap", "a bb ccc", 4),
            call("wrap", "toolongword it is", 5),
            call("center", "ab", 5),
            call("center", "abc", 2),
        ),
        choosing(
            lambda d: call("wrap", " ".join(d.texts("ab", 8, 5)), d.number(1, 12)),
            lambda d: call("center", d.text("ab", 4), d.number(0, 9)),
        ),
    ),
    "csv_line": Cases(
        (
            call("split_line", 'a,"b, ""c""",'),
            call("split_line", ""),
            call("split_line", "a,b"),
            call("join_line", ["a", "b, c"]),
            call("join_line", ['say "x"', ""]),
            call("join_line", ["a b"]),
        ),
        choosing(lambda d: call("split_line", _quoted(d)), lambda d: call("join_line", [_cell(d) for _ in range(3)])),
    ),
    "versions": Cases(
        (
            call("compare", "1.9", "1.10"),
            call("compare", "2.0", "2"),
            call("compare", "3", "2.9"),
            call("newest", ["1.2", "2.0", "1.11"], 1),
            call("newest", ["1.2"], 3),
            call("parts_of", "0.0"),
            call("newest", ["1.0", "1"], 1),
        ),
        choosing(
            lambda d: call("compare", _version(d), _version(d)),
            lambda d: call("newest", [_version(d) for _ in range(d.number(1, 5))], d.number(0, 2)),
            lambda d: call("parts_of", _version(d)),
        ),
    ),
    "calculator": Cases(
        (
            call("evaluate", "2 + 3 * (7 - 4) / 2"),
            call("evaluate", "8 - 3 - 2"),
            call("evaluate", "7 / 2 * 2"),
            call("evaluate", "12"),
            call("tokens_of", "12*(3 - 4)"),
            call("evaluate", "1 / 0"),
            call("evaluate", "1)"),
        ),
        choosing(lambda d: call("evaluate", _expression(d, 3)), lambda d: call("tokens_of", _expression(d, 2))),
    ),
}


def _version(d: Draw) -> str:
    return ".".join(str(d.one_of((0, 1, 2, 10))) for _ in range(d.number(1, 3)))


def _expression(d: Draw, depth: int) -> str:
    if depth == 0 or d.number(0, 3) == 0:
        return str(d.number(1, 20))
    text = _expression(d, depth - 1) + d.one_of((" + ", " - ", "*", " * ", " / ")) + _expression(d, depth - 1)
    return f"({text})" if d.number(0, 1) else text
