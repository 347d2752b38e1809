"""The text of single tokens for people: where a character is spread over several tokens, it is put together again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # sentencepiece's byte fallback
_LOOSE_BYTES = re.compile("[\udc80-\udcff]+")


def _byte_letters() -> dict[str, int]:
    """Return the byte of each letter with which byte-level vocabularies spell bytes (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable_bytes = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(unprintable_bytes)}


_BYTE_LETTERS = _byte_letters()


class TokenTexts:
    """Text of tokens, alone and in their sequence.

    Args:
        tokenizer: a `tokenizers.Tokenizer` (Any: untyped).
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Decoders drop the gap before the first word of a text: each token is read behind another one.
        self._anchor = min(tokenizer.get_added_tokens_decoder(), default=0)
        self._anchor_text = self._decode([self._anchor])
        self._pieces: dict[int, str | bytes] = {}

    def alone(self, token_id: int) -> str:
        """Return the text of a token by itself; bytes that are no whole character are written as ⟨F0 9F⟩."""
        piece = self._piece(token_id)
        return piece if isinstance(piece, str) else _join([piece])[0]

    def in_sequence(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token; the whole of a character is in the text of the token that begins it.

        A token which holds only bytes of a character that an earlier one begins has the text "".
        """
        texts: list[str] = []
        parts: list[bytes] = []
        for token_id in token_ids:
            piece = self._piece(token_id)
            if isinstance(piece, bytes):
                parts.append(piece)
            else:
                texts += [*_join(parts), piece]
                parts = []
        return texts + _join(parts)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens that follow others; special tokens are always kept."""
        assert not skip_special_tokens, "special tokens are shown"
        return "".join(self.in_sequence(token_ids))

    def _piece(self, token_id: int) -> str | bytes:
        """Return the token's text, or its bytes if they are not whole characters."""
        if (piece := self._pieces.get(token_id)) is None:
            text = self._decode([self._anchor, token_id]).removeprefix(self._anchor_text)
            piece = self._bytes_of(token_id) if "\ufffd" in text else None
            piece = self._pieces[token_id] = text if piece is None else piece
        return piece

    def _bytes_of(self, token_id: int) -> bytes | None:
        name = self._tokenizer.id_to_token(token_id) or ""
        if match := _BYTE_NAME.fullmatch(name):
            return bytes([int(match[1], 16)])
        return bytes(_BYTE_LETTERS[letter] for letter in name) if name and set(name) <= _BYTE_LETTERS.keys() else None

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text


def _join(parts: Sequence[bytes]) -> list[str]:
    """Return the text of each part of a sequence of bytes."""
    owners = [number for number, part in enumerate(parts) for _ in part]  # of each byte
    texts, at = [""] * len(parts), 0
    # A byte that is in no character becomes one of the code points U+DC80 to U+DCFF.
    for character in b"".join(parts).decode("utf-8", "surrogateescape"):
        texts[owners[at]] += character
        at += len(character.encode("utf-8", "surrogateescape"))
    return [_LOOSE_BYTES.sub(lambda run: f"⟨{_hexadecimal(run[0])}⟩", text) for text in texts]


def _hexadecimal(loose: str) -> str:
    return loose.encode("utf-8", "surrogateescape").hex(" ").upper()
