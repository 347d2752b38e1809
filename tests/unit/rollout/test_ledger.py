"""The ledger.

Pinned here: 1. counts and balance by hand; 2. contradictions are refused; 3. the file says the same as memory and
survives a torn last line; 4. a long run takes no more memory than a short one.
"""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from gspo_gym.errors import RecordError
from gspo_gym.rollout.ledger import (
    MAX_REMEMBERED,
    Dispatched,
    Disposition,
    Ledger,
    Terminal,
    close_lost,
    imbalances,
    read_ledger,
)
from gspo_gym.types import Outcome


def dispatched(name: str, attempt: int = 0) -> Dispatched:
    return Dispatched(name, attempt, "Talk-v0#1", 1, 99)


def terminal(name: str, attempt: int = 0, disposition: Disposition = Disposition.KEPT) -> Terminal:
    return Terminal(name, attempt, Outcome.TERMINATED, disposition)


def test_every_attempt_counts_once() -> None:
    ledger = Ledger()
    ledger.dispatch(dispatched("a"))
    ledger.dispatch(dispatched("b"))
    ledger.settle(Terminal("b", 0, Outcome.ENV_ERROR, Disposition.RETRIED, "raised"))
    ledger.dispatch(dispatched("b", 1))
    assert ledger.num_in_flight == 2
    with pytest.raises(RecordError, match="2 attempts do not balance: attempt 0 of a: dispatched 1, settled 0 times"):
        ledger.assert_balanced()
    ledger.settle(terminal("a"))
    ledger.settle(terminal("b", 1, Disposition.DROPPED))
    ledger.assert_balanced()
    assert ledger.num_in_flight == 0
    assert ledger.counts() == {"dispatched": 3, "kept": 1, "retried": 1, "dropped": 1}


def test_of_many_that_do_not_balance_the_first_five_are_named() -> None:
    ledger = Ledger()
    for name in "abcdef":
        ledger.dispatch(dispatched(name))
    with pytest.raises(RecordError, match=r"6 attempts do not balance: .*attempt 0 of e: [^;]*$"):
        ledger.assert_balanced()


def test_contradictions_are_refused_when_they_happen() -> None:
    ledger = Ledger(keeps_entries=True)
    ledger.dispatch(dispatched("a"))
    with pytest.raises(RecordError, match="attempt 0 of a was dispatched twice"):
        ledger.dispatch(dispatched("a"))
    with pytest.raises(RecordError, match="attempt 1 of a ended without having been dispatched"):
        ledger.settle(terminal("a", 1))
    ledger.settle(terminal("a"))
    with pytest.raises(RecordError, match="attempt 0 of a ended twice"):
        ledger.settle(terminal("a"))
    assert len(ledger.entries) == 2


def test_imbalances_of_any_entries_are_listed() -> None:
    entries = [dispatched("a"), dispatched("a"), terminal("a"), terminal("b"), dispatched("c"), terminal("c")]
    assert imbalances(entries) == [
        "attempt 0 of a: dispatched 2, settled 1 times",
        "attempt 0 of b: dispatched 0, settled 1 times",
    ]


def test_attempts_without_an_end_get_one_in_the_order_of_their_dispatch() -> None:
    entries = [dispatched("b"), dispatched("a"), dispatched("c"), terminal("a"), dispatched("a", 1), terminal("d")]
    lost = [("b", 0), ("c", 0), ("a", 1)]
    assert [(end.trajectory_id, end.attempt) for end in close_lost(entries)] == lost
    assert {(end.outcome, end.disposition) for end in close_lost(entries)} == {(Outcome.CANCELLED, Disposition.DROPPED)}


def test_the_file_gives_back_what_was_entered(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.dispatch(dispatched("a"))
    ledger.settle(Terminal("a", 0, Outcome.ENV_TIMEOUT, Disposition.DROPPED, "two\nlines"))
    assert ledger.entries == (dispatched("a"), Terminal("a", 0, Outcome.ENV_TIMEOUT, Disposition.DROPPED, "two\nlines"))
    again = Ledger(tmp_path / "ledger.jsonl")  # as a run that goes on: the names are free, what was written stays
    again.dispatch(dispatched("a"))
    assert again.entries == (dispatched("a"),)
    assert len(read_ledger(tmp_path / "ledger.jsonl")) == 3


def test_a_long_run_takes_no_more_memory_than_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """5,000 attempts, of which 1,000 are remembered, and 5,000 more: 500 bytes each would be 2.5 MB."""

    def play(first: int) -> None:
        for number in range(first, first + 5000):
            ledger.dispatch(dispatched(f"step_000001/group_0000/{number}"))
            ledger.settle(terminal(f"step_000001/group_0000/{number}"))

    monkeypatch.setattr("gspo_gym.rollout.ledger.MAX_REMEMBERED", 1000)
    ledger = Ledger()
    tracemalloc.start()
    try:
        play(0)
        before, _ = tracemalloc.get_traced_memory()
        play(5000)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 250_000
    assert ledger.counts()["kept"] == 10_000
    with pytest.raises(RecordError, match="ended twice"):
        ledger.settle(terminal("step_000001/group_0000/9999"))
    with pytest.raises(RecordError, match="expected a path or keeps_entries"):
        _ = ledger.entries


def test_the_last_ended_attempts_are_remembered_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    # As many as in a step of 50,000 attempts, and in less than 10 MB at 100 bytes each.
    assert 50_000 < MAX_REMEMBERED < 100_000
    monkeypatch.setattr("gspo_gym.rollout.ledger.MAX_REMEMBERED", 2)
    ledger = Ledger()
    for name in "abc":
        ledger.dispatch(dispatched(name))
        ledger.settle(terminal(name))
    for name in "bc":
        with pytest.raises(RecordError, match=f"attempt 0 of {name} was dispatched twice"):
            ledger.dispatch(dispatched(name))
    ledger.dispatch(dispatched("a"))


def test_a_torn_line_is_left_out_and_cut_off_before_the_next_entry(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    Ledger(path).dispatch(dispatched("a"))
    with path.open("a") as file:
        file.write('{"event": "term')  # the process died here
    assert read_ledger(path) == (dispatched("a"),)
    Ledger(path).dispatch(dispatched("b"))
    assert read_ledger(path) == (dispatched("a"), dispatched("b"))


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"event": "dispatched"}\n{"event": "?"}\n')
    with pytest.raises(RecordError, match=r"ledger\.jsonl:1: not a ledger entry"):
        read_ledger(path)
    entry = '{"event": "%s", "trajectory_id": "a", "attempt": 0, "outcome": "terminated", "disposition": "kept"}\n'
    path.write_text(entry % "terminal" + entry % "ended")
    with pytest.raises(RecordError, match=r"ledger\.jsonl:2: not a ledger entry: unknown event 'ended'"):
        read_ledger(path)
