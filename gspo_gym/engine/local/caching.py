"""How much of a sequence an engine keeps for its later tokens: a word that the batches and `LocalEngine` share."""

from __future__ import annotations

import enum


class Caching(enum.StrEnum):
    """What is kept of a sequence, in whatever cache there is.

    TURNS: all of it; a turn reads its new tokens only. TOKENS: all of it until its turn ends; the next one reads the
    history again. NONE: nothing; every token reads it again.
    """

    TURNS = "turns"
    TOKENS = "tokens"
    NONE = "none"
