"""Cache of judgements, in memory and in files, by a key of everything that they depend on.

A file holds one answer and its digest; a torn or changed file counts as missing and is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import tempfile
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAX_IN_MEMORY = 8192

Json = Any  # a JSON value


def digest_of(value: Json) -> str:
    """Return the SHA-256 of a JSON value, independent of the order of keys; 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, allow_nan=False).encode()).hexdigest()


@dataclass(slots=True)
class CacheCounters:
    """Counts so far: `num_corrupt` files failed their digest, `num_unwritten` could not be written."""

    num_hits: int = 0
    num_misses: int = 0
    num_corrupt: int = 0
    num_unwritten: int = 0


class JudgementCache:
    """Answers by key; without a folder, in memory alone. Use it in one event loop; processes may share a folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self.counters = CacheCounters()
        self._folder = folder
        self._memory: OrderedDict[str, Json] = OrderedDict()
        self._being_asked: dict[str, asyncio.Task[Json]] = {}

    async def get_or_ask(self, key: str, ask: Callable[[], Awaitable[Json]]) -> Json:
        """Return the answer kept under the key, or ask for it and keep it.

        An error of `ask` is raised to all callers, and nothing is kept.
        """
        if key in self._memory:
            self.counters.num_hits += 1
            self._memory.move_to_end(key)
            return self._memory[key]
        # Equal questions at the same time are asked once: equal episodes get equal scores even from a judge that would
        # answer twice differently.
        task = self._being_asked.get(key)
        if task is None:
            task = asyncio.ensure_future(self._read_or_ask(key, ask))
            self._being_asked[key] = task
            task.add_done_callback(lambda done: self._end(key, done))
        else:
            self.counters.num_hits += 1
        return await asyncio.shield(task)  # a cancelled caller must not end the question of the others

    async def close(self) -> None:
        """Cancel open questions."""
        tasks = list(self._being_asked.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read_or_ask(self, key: str, ask: Callable[[], Awaitable[Json]]) -> Json:
        found = None if self._folder is None else await asyncio.to_thread(self._read, key)
        if found is None:
            self.counters.num_misses += 1
            answer = await ask()
            if self._folder is not None:
                await asyncio.to_thread(self._write, key, answer)
        else:
            self.counters.num_hits += 1
            answer = found[0]
        self._memory[key] = answer
        if len(self._memory) > _MAX_IN_MEMORY:
            self._memory.popitem(last=False)
        return answer

    def _end(self, key: str, task: asyncio.Task[Json]) -> None:
        del self._being_asked[key]
        if not task.cancelled():
            task.exception()  # seen: there may be nobody left who waits for it

    def _path(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / key[:2] / f"{key}.json"

    def _read(self, key: str) -> tuple[Json] | None:
        try:
            text = self._path(key).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            self.counters.num_corrupt += 1
            return None
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            entry = json.loads(text)
            if entry["key"] == key and entry["digest"] == digest_of(entry["answer"]):
                return (entry["answer"],)
        self.counters.num_corrupt += 1
        return None

    def _write(self, key: str, answer: Json) -> None:
        path = self._path(key)
        entry = json.dumps({"key": key, "digest": digest_of(answer), "answer": answer})
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as draft:
                draft.write(entry)
            os.replace(draft.name, path)  # not synced: the digest finds what a power cut tears
        except OSError:  # a full disk costs no score
            self.counters.num_unwritten += 1
