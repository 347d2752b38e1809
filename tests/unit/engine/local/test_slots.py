"""Slots: who owns which, and whose turn it is to lose one."""

from __future__ import annotations

from gspo_gym.engine.local.batch import SlotTable


def test_the_lowest_free_slot_is_handed_out_first() -> None:
    slots = SlotTable(4)
    assert [slots.acquire(None) for _ in range(3)] == [0, 1, 2]
    slots.release(1)
    slots.release(0)
    assert slots.acquire(None) == 0


def test_a_session_gets_its_own_slot_back() -> None:
    slots = SlotTable(4)
    assert slots.acquire("a") == 0
    assert slots.acquire("b") == 1
    slots.release(0)
    slots.release(1)
    assert slots.kept_slot("b") == 1
    assert slots.acquire("b") == 1
    assert slots.kept_slot("b") is None


def test_the_session_that_waited_longest_loses_its_slot_when_all_are_taken() -> None:
    slots = SlotTable(2)
    for session in ("a", "b"):
        slots.acquire(session)
    slots.release(1)  # b's
    slots.release(0)  # a's, later
    assert slots.acquire("c") == 1
    assert slots.kept_slot("b") is None
    assert slots.kept_slot("a") == 0


def test_there_is_no_slot_while_all_are_in_work() -> None:
    slots = SlotTable(1)
    slots.acquire("a")
    assert slots.acquire("b") is None
    slots.release(0)
    assert slots.acquire("b") == 0


def test_a_second_request_of_a_session_in_work_is_served_without_it() -> None:
    slots = SlotTable(2)
    first, second = slots.acquire("a"), slots.acquire("a")
    assert (first, second) == (0, 1)
    slots.release(1)
    assert slots.kept_slot("a") is None
    slots.release(0)
    assert slots.kept_slot("a") == 0


def test_an_ended_session_frees_its_slot_at_once_or_when_its_request_is_done() -> None:
    slots = SlotTable(2)
    slots.acquire("waiting")
    slots.release(0)
    slots.acquire("working")
    slots.end_session("waiting")
    slots.end_session("working")
    slots.end_session("unknown")
    assert slots.num_in_work == 1
    assert slots.free == {0}
    slots.release(1)
    assert slots.num_in_work == 0
    assert slots.kept_slot("working") is None
    assert [slots.acquire(None) for _ in range(3)] == [0, 1, None]


def test_a_session_in_work_is_kept_when_others_end_and_all_that_wait_are_forgotten_at_once() -> None:
    slots = SlotTable(3)
    for session in ("a", "b", "c"):
        slots.acquire(session)
    slots.end_session("b")
    for slot in range(2):
        slots.release(slot)
    assert [slots.kept_slot(session) for session in ("a", "b", "c")] == [0, None, None]
    assert (slots.num_used, slots.num_in_work) == (2, 1)
    slots.forget_sessions()
    assert slots.kept_slot("a") is None
    assert slots.free == {0, 1}  # c's is in work
    slots.release(2)
    assert slots.kept_slot("c") == 2
