"""The text of tokens that hold parts of characters: a waving hand is F0 9F 91 8B in UTF-8, and e with acute C3 A9."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gspo_gym.policy.tiny import tiny_tokenizer
from gspo_gym.rollout.episode_files import write_episodes
from gspo_gym.run.report.page_data import RecordedStep
from gspo_gym.run.report.token_text import TokenTexts
from tests.unit.run.report.test_page_data import played

HAND = [0xF0, 0x9F, 0x91, 0x8B]


def merged() -> Tokenizer:
    """Byte-level BPE with the tokens of a space and the first half of a hand, and of its second half."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letter = dict(enumerate(tiny_tokenizer().convert_ids_to_tokens(range(256))))  # of each byte
    first = [letter[byte] for byte in (0x20, 0xF0, 0x9F)]
    second = [letter[byte] for byte in (0x91, 0x8B)]
    joined = ["".join(first[:2]), "".join(first), "".join(second)]
    vocabulary = {text: i for i, text in enumerate([*alphabet, *joined])}
    merges = [(first[0], first[1]), (joined[0], first[2]), (second[0], second[1])]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    return backend


def sentencepiece() -> Tokenizer:
    """Words marked by a leading low line, with bytes for what has no token; decoding drops the first gap."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "▁h", "▁hi", "<s>"]
    merges = [("▁", "h"), ("▁h", "i")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return backend


def tiny() -> Tokenizer:
    """Ids 0 to 255 are the bytes."""
    backend: Tokenizer = tiny_tokenizer().backend_tokenizer
    return backend


@pytest.mark.parametrize(
    ("tokenizer", "text", "expected"),
    [
        (tiny, "a\U0001f44b\u00e9!", ["a", "\U0001f44b", "", "", "", "\u00e9", "", "!"]),
        (merged, "a \U0001f44b!", ["a", " \U0001f44b", "", "!"]),
        (sentencepiece, "hi hi\U0001f44b", [" hi", " hi", "\U0001f44b", "", "", ""]),
    ],
)
def test_a_character_that_spans_tokens_is_the_text_of_the_first_of_them(
    tokenizer: Any, text: str, expected: list[str]
) -> None:
    made = tokenizer()
    texts = TokenTexts(made)
    ids = made.encode(text, add_special_tokens=False).ids
    assert texts.in_sequence(ids) == expected
    assert texts.decode(ids) == "".join(expected)


@pytest.mark.parametrize(
    ("tokenizer", "text", "expected"),
    [
        (tiny, "\U0001f44b", ["⟨F0⟩", "⟨9F⟩", "⟨91⟩", "⟨8B⟩"]),
        (merged, " \U0001f44b", [" ⟨F0 9F⟩", "⟨91 8B⟩"]),
        (sentencepiece, "hi\U0001f44b", [" hi", "⟨F0⟩", "⟨9F⟩", "⟨91⟩", "⟨8B⟩"]),
    ],
)
def test_a_part_of_a_character_is_written_as_its_bytes(tokenizer: Any, text: str, expected: list[str]) -> None:
    made = tokenizer()
    texts = TokenTexts(made)
    assert [texts.alone(i) for i in made.encode(text, add_special_tokens=False).ids] == expected


def test_bytes_that_make_no_character_stay_bytes_beside_ones_that_do() -> None:
    """A hand that is cut off, a special token, a stray byte before a whole hand, and a replacement character."""
    end = tiny().token_to_id("<|im_end|>")
    read = TokenTexts(tiny()).in_sequence([*HAND[:3], end, 0x8B, *HAND, 0xEF, 0xBF, 0xBD])
    assert read == ["⟨F0⟩", "⟨9F⟩", "⟨91⟩", "<|im_end|>", "⟨8B⟩", "\U0001f44b", "", "", "", "\ufffd", "", ""]


def test_the_page_has_a_text_for_each_token_and_for_parts_of_a_character_one_in_their_place(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[model]\nlabel = 'test'\n")
    for folder in ("episodes", "checkpoints/step_000001"):
        (tmp_path / folder).mkdir(parents=True)
    tiny_tokenizer().save_pretrained(tmp_path / "checkpoints" / "step_000001")
    write_episodes(tmp_path / "episodes" / "step_000001.jsonl.gz", [played(0, [0x61, *HAND, 0xF0])])
    group = RecordedStep(tmp_path, "step_000001").group(0)
    assert group["vocabulary"] == {0x61: "a", 0xF0: "⟨F0⟩", 0x9F: "⟨9F⟩", 0x91: "⟨91⟩", 0x8B: "⟨8B⟩"}
    # the second F0, at place 5, is alone in its place, too
    assert group["episodes"][0]["segments"][0]["texts"] == {1: "\U0001f44b", 2: "", 3: "", 4: ""}
