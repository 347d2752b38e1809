"""Rendered text to token ids and back. A message that holds the text of a special token gets ordinary tokens for it.

Text without special tokens is tokenised exactly as by `tokenizer(text, add_special_tokens=False)`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from gspo_gym.errors import TemplateError

_MAX_REMEMBERED = 4096  # texts
_MAX_REMEMBERED_CHARACTERS = 2048  # of each, which bounds the memory to 8 million characters
_MARKER = re.compile(r"zx\d{7}")  # stands for a special token's text until the rest is tokenised


class Escapes:
    """The special-token texts in the messages of one rendering, each replaced by a marker. Grows; not shared."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self._markers: dict[str, str] = {}

    @property
    def originals(self) -> list[str]:  # in the order of their markers' numbers
        return list(self._markers)

    def __call__(self, text: str) -> str:
        """Return the text with markers in place of special tokens, and of texts that look like markers.

        Raises:
            TemplateError: the text is not Unicode, so no tokenizer can read it.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TemplateError(
                f"a message holds half of a surrogate pair at character {error.start}; remove it"
            ) from error
        return self._pattern.sub(self._keep, text)

    def _keep(self, match: re.Match[str]) -> str:
        # Equal texts get equal markers, because a template may compare messages.
        return self._markers.setdefault(match.group(), f"zx{len(self._markers):07d}")


class TextCodec:
    """Encoder and decoder for one transformers tokenizer.

    Attributes:
        added: id by text of every token added to the vocabulary, special or not.
        special: texts of the special ones.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        token_by_id = tokenizer.added_tokens_decoder
        self.added: dict[str, int] = {token.content: token_id for token_id, token in token_by_id.items()}
        self.special = frozenset(token.content for token in token_by_id.values() if token.special)
        self._any_special = _alternation(self.special)
        self._any_added = _alternation(self.added)
        # A special token that eats no spaces, put before a text that does not begin the sequence.
        self._anchor = min(
            (t.content for t in token_by_id.values() if t.special and not (t.lstrip or t.rstrip)), default=""
        )
        self._guarded_texts: frozenset[str] = self.special
        self._escape_regex = _escape_pattern(self._guarded_texts)
        self._plain_ids: dict[str, list[int]] = {}
        self._ids_by_text: dict[str, tuple[int, ...]] = {}
        self._anchor_texts: dict[int, str] = {}
        normalizes = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None) is not None
        # A normaliser may find a token in text that does not spell it, such as full-width brackets.
        self._finds_respelled = normalizes and any(token.normalized for token in token_by_id.values())

    def guard(self, texts: Iterable[str]) -> None:
        """Treat these added tokens like special ones inside messages."""
        self._guarded_texts = self.special | frozenset(texts)
        self._ids_by_text.clear()  # `_require_spelled_out` depends on the guarded tokens
        self._escape_regex = _escape_pattern(self._guarded_texts)

    def escapes(self) -> Escapes:
        return Escapes(self._escape_regex)

    def find_special(self, text: str) -> re.Match[str] | None:
        """Return the first special token in the text."""
        return self._any_special.search(text)

    def special_in(self, text: str) -> list[str]:
        """Return the special tokens in the text, in order."""
        return self._any_special.findall(text)

    def find_added(self, text: str) -> re.Match[str] | None:
        """Return the first added token in the text, special or not."""
        return self._any_added.search(text)

    def encode(self, text: str, escapes: Escapes | None = None, *, after: str = "") -> list[int]:
        """Return the ids of rendered text.

        Args:
            escapes: meaning of the markers in the text; None if nothing was escaped.
            after: special token before the text, not part of the result. Sentencepiece tokenizers treat the start of a
                string differently, but not the text after a special token.
        """
        originals = [] if escapes is None else escapes.originals
        if not originals:
            return self._encode_behind(after, text)
        # The message was rendered with a marker in place of each special token's text, whose ids are inserted after
        # tokenisation: only merges across its edges are lost.
        ids: list[int] = []
        position = 0
        for marker in _MARKER.finditer(text):
            ids += self._encode_behind(self._anchor if position else after, text[position : marker.start()])
            ids += self._encode_as_plain(originals[int(marker.group()[2:])])
            position = marker.end()
        return ids + self._encode_behind(self._anchor if position else after, text[position:])

    def decode(self, token_ids: Sequence[int], *, after: int) -> str:
        """Return the text of ids that follow the special token `after`; special tokens are kept."""
        if (anchor := self._anchor_texts.get(after)) is None:
            anchor = self._anchor_texts[after] = self._decode([after])
        return self._decode([after, *token_ids]).removeprefix(anchor)

    def spellable(self, text: str) -> str:
        """Return the text without the characters that get lost in tokens, or are tokens of the template."""
        return text if self._is_spellable(text) else "".join(filter(self._is_spellable, text))

    def _is_spellable(self, text: str) -> bool:
        if self._any_added.search(text) is not None:
            return False
        ids = self._encode_behind(self._anchor, text)
        round_trip = self.decode(ids, after=self.added[self._anchor]) if self._anchor else self._decode(ids)
        return round_trip == text

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _encode_behind(self, anchor: str, text: str) -> list[int]:
        if not text:
            return []
        if not anchor:
            return self._encode(text)
        ids = self._encode(anchor + text)
        return ids[1:] if ids[0] == self.added.get(anchor) else self._encode(text)

    def _encode(self, text: str) -> list[int]:
        # Environments repeat themselves, and the episodes of a group read the same. Besides the time of encoding,
        # the cache saves waits: the tokenizer releases the GIL, and gets it back late from an engine that decodes in
        # another thread.
        if (cached_ids := self._ids_by_text.get(text)) is not None:
            return list(cached_ids)
        ids = self._encode_anew(text)
        if len(text) <= _MAX_REMEMBERED_CHARACTERS:
            if len(self._ids_by_text) >= _MAX_REMEMBERED:
                del self._ids_by_text[next(iter(self._ids_by_text))]
            self._ids_by_text[text] = tuple(ids)
        return ids

    def _encode_anew(self, text: str) -> list[int]:
        encoding = self._tokenizer(text, add_special_tokens=False, split_special_tokens=False, verbose=False)
        ids: list[int] = encoding["input_ids"]
        if self._finds_respelled:
            self._require_spelled_out(text, ids)
        return ids

    def _require_spelled_out(self, text: str, ids: list[int]) -> None:
        forbidden = {self.added[token]: token for token in self._guarded_texts}
        for token_id, token in forbidden.items():
            if ids.count(token_id) > text.count(token):
                raise TemplateError(
                    f"a message contains another spelling of {token!r} that this tokenizer normalises to it"
                )

    def _encode_as_plain(self, text: str) -> list[int]:
        if text not in self._plain_ids:
            self._plain_ids[text] = self._find_plain(text)
        return self._plain_ids[text]

    def _find_plain(self, text: str) -> list[int]:
        if _MARKER.fullmatch(text):
            return self._encode_behind(self._anchor, text)
        # Tokenised in two halves. `split_special_tokens=True` would do it in one, but is a switch on the shared
        # tokenizer: another thread would tokenise a template with its special tokens taken apart.
        forbidden = {self.added[token] for token in self._guarded_texts}
        for cut in range(1, len(text)):
            ids = self._encode_behind(self._anchor, text[:cut]) + self._encode_behind(self._anchor, text[cut:])
            if not forbidden.intersection(ids):
                return ids
        raise TemplateError(
            f"a message contains {text!r}, which this tokenizer can only read as its special token; remove it"
        )


def _escape_pattern(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile(f"{_alternation(texts).pattern}|{_MARKER.pattern}")


def _alternation(texts: Iterable[str]) -> re.Pattern[str]:
    # The longest first: of two tokens that begin alike, the longer is meant. No texts: a pattern that matches nothing.
    longest_first = sorted((text for text in texts if text), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
