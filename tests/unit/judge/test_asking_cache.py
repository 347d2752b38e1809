"""The cache: asked once, kept in files that may break, and equal questions at the same time are one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from gspo_gym.judge.asking import JudgementCache, digest_of

KEY = digest_of("question")


class Asked:
    """Answers with the number of the question; counts."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.hold = asyncio.Event()
        self.hold.set()

    async def __call__(self) -> dict[str, int]:
        self.num_asked += 1
        number = self.num_asked
        await self.hold.wait()
        return {"answer": number}


def play(scene: Callable[[Asked], Awaitable[None]]) -> None:
    async def run() -> None:
        await scene(Asked())

    asyncio.run(run())


def test_a_second_question_is_answered_from_memory_and_in_another_process_from_the_file(tmp_path: Path) -> None:
    async def scene(ask: Asked) -> None:
        cache = JudgementCache(tmp_path)
        assert [await cache.get_or_ask(KEY, ask) for _ in range(2)] == [{"answer": 1}] * 2
        other = JudgementCache(tmp_path)
        assert await other.get_or_ask(KEY, ask) == {"answer": 1}
        assert await other.get_or_ask(digest_of("another"), ask) == {"answer": 2}

    play(scene)
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".json"] * 2  # and no drafts


def test_equal_questions_at_the_same_time_are_asked_once() -> None:
    async def scene(ask: Asked) -> None:
        cache = JudgementCache()
        ask.hold.clear()
        waiting = [asyncio.create_task(cache.get_or_ask(KEY, ask)) for _ in range(5)]
        await asyncio.sleep(0)
        waiting[0].cancel()  # who asked first stops waiting; the others still get the answer
        await asyncio.sleep(0)
        ask.hold.set()
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(answers[0], asyncio.CancelledError)
        assert answers[1:] == [{"answer": 1}] * 4
        assert ask.num_asked == 1

    play(scene)


def test_a_failure_reaches_all_who_wait_and_is_not_kept() -> None:
    async def scene(ask: Asked) -> None:
        cache = JudgementCache()

        async def fail() -> None:
            await asyncio.sleep(0)
            raise RuntimeError("on purpose")

        answers = await asyncio.gather(*(cache.get_or_ask(KEY, fail) for _ in range(3)), return_exceptions=True)
        assert [str(answer) for answer in answers] == ["on purpose"] * 3
        assert await cache.get_or_ask(KEY, ask) == {"answer": 1}

    play(scene)


@pytest.mark.parametrize(
    "broken",
    ["", "{", "[]", "null", '{"key": 1}', "\x00" * 50, "[" * 100_000, json.dumps({"key": KEY, "answer": 1})],
    ids=range(8),
)  # fmt: skip
def test_a_broken_file_is_asked_for_again_and_replaced(tmp_path: Path, broken: str) -> None:
    path = tmp_path / KEY[:2] / f"{KEY}.json"
    path.parent.mkdir()
    path.write_text(broken)

    async def scene(ask: Asked) -> None:
        cache = JudgementCache(tmp_path)
        assert await cache.get_or_ask(KEY, ask) == {"answer": 1}
        assert await JudgementCache(tmp_path).get_or_ask(KEY, ask) == {"answer": 1}

    play(scene)


def test_a_changed_score_or_another_questions_file_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / KEY[:2] / f"{KEY}.json"

    async def scene(ask: Asked) -> None:
        await JudgementCache(tmp_path).get_or_ask(KEY, ask)
        entry = json.loads(path.read_text())
        for number, change in enumerate(({"answer": {"answer": 100}}, {"key": digest_of("another")}), start=2):
            path.write_text(json.dumps({**entry, **change}))
            assert await JudgementCache(tmp_path).get_or_ask(KEY, ask) == {"answer": number}

    play(scene)


def test_a_folder_that_cannot_be_written_costs_no_answer(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")

    async def scene(ask: Asked) -> None:
        cache = JudgementCache(tmp_path / "file")
        assert await cache.get_or_ask(KEY, ask) == {"answer": 1}

    play(scene)


def test_a_digest_does_not_depend_on_the_order_of_keys() -> None:
    assert digest_of({"a": 1, "b": [2]}) == digest_of({"b": [2], "a": 1}) != digest_of({"a": 1, "b": [2.5]})
