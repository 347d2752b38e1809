"""Cores for vLLM's workers, variables for its processes, and which copy of a model answers a session."""

from __future__ import annotations

import os

import pytest

from gspo_gym.engine.vllm.settings import SessionRanks, allowed_cores, binding_of, environment


@pytest.mark.parametrize(
    ("num_workers", "cores", "binding"),
    [
        (2, [0, 1], "0|1"),
        (2, [4, 5, 6, 7], "4,5|6,7"),
        (2, [0, 2, 4, 6, 8], "0,2|4,6"),  # as many for each, so that none waits for another
        (3, [0, 1], "nobind"),
    ],
)
def test_workers_have_as_many_cores_each_and_none_twice(num_workers: int, cores: list[int], binding: str) -> None:
    assert binding_of(num_workers, cores) == binding


def test_cores_are_those_of_this_process_or_all_where_the_system_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5, 3} if process == 0 else {0}, raising=False)
    assert allowed_cores() == [3, 5]
    monkeypatch.delattr(os, "sched_getaffinity")
    for count, cores in ((3, [0, 1, 2]), (None, [0])):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert allowed_cores() == cores


def test_variables_are_there_within_and_those_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSPO_TEST_THEIRS", "theirs")
    monkeypatch.delenv("GSPO_TEST_OURS", raising=False)

    def fail() -> None:
        with environment({"GSPO_TEST_OURS": "ours", "GSPO_TEST_THEIRS": "ours"}):
            assert (os.environ["GSPO_TEST_OURS"], os.environ["GSPO_TEST_THEIRS"]) == ("ours", "theirs")
            raise RuntimeError("did not start")

    with pytest.raises(RuntimeError, match="did not start"):
        fail()
    assert "GSPO_TEST_OURS" not in os.environ
    assert os.environ["GSPO_TEST_THEIRS"] == "theirs"


def test_sessions_stay_and_new_ones_go_round() -> None:
    ranks = SessionRanks(3)
    sessions = ["a", "b", "a", "c", "d", "b"]
    assert [ranks.of(session) for session in sessions] == [0, 1, 0, 2, 0, 1]
    ranks.forget("a")
    ranks.forget("never seen")
    assert ranks.of("a") == 1  # a new one of that name
    assert ranks.of("d") == 0


def test_without_a_session_or_without_copies_vllm_chooses() -> None:
    assert SessionRanks(3).of(None) is None
    assert SessionRanks(1).of("a") is None
