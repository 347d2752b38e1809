"""The store of jobs: numbers of events without a gap, and nothing recorded twice."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from forked import forked
from full_disk import small_disk

from gspo_gym.cli.jobs.store import Event, Store
from gspo_gym.errors import StorageError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "jobs.sqlite3", clock=lambda: 7.0)


def queue(store: Store) -> str:
    return store.create({}, base="base", config_of=lambda job_id: f"# {job_id}", max_queued=9)[0].job_id


def test_events_of_many_threads_are_numbered_without_a_gap(store: Store) -> None:
    jobs = [queue(store), queue(store)]
    with ThreadPoolExecutor(8) as threads:
        for number in range(100):
            threads.submit(store.record, jobs[number % 2], [Event("x", str(number)), Event("y", str(number))])
    for job_id in jobs:
        events = store.events(job_id, after=0, limit=999)
        assert [event.seq for event in events] == list(range(1, 102))
        # the two of a call stand together
        assert [event.message for event in events[1::2]] == [event.message for event in events[2::2]]
    store.close()


def test_an_event_with_a_known_source_is_not_recorded_again_and_takes_no_number(store: Store) -> None:
    job_id = queue(store)
    for _ in range(2):
        store.record(job_id, [Event("x", "", source="1"), Event("x", "", source="2")])
    assert [event.seq for event in store.events(job_id, after=0, limit=9)] == [1, 2, 3]
    store.close()


def test_a_transaction_that_raises_leaves_nothing(store: Store) -> None:
    job_id = queue(store)
    with pytest.raises(TypeError), store.transaction():
        store.record(job_id, [Event("x", "", phase="training"), Event("y", "", {"no": object()})])
    job = store.require(job_id)
    assert (job.status, job.pid, len(store.events(job_id, after=0, limit=9))) == ("queued", None, 1)
    store.close()


@pytest.mark.parametrize("may_mount", [True, False])
@forked
def test_a_full_disk_takes_nothing_of_a_transaction_and_the_next_one_that_has_room_all(
    tmp_path: Path, may_mount: bool
) -> None:
    with small_disk(tmp_path / "disk", 1_000_000, may_mount=may_mount) as disk:
        store = Store(disk.folder / "jobs.sqlite3")
        job_id = queue(store)
        with pytest.raises(StorageError, match=r"jobs\.sqlite3: (database or disk is full|disk I/O error)"):
            store.update(job_id, Event("x", "m" * 2_000_000), status="training")
        assert (store.require(job_id).status, len(store.events(job_id, after=0, limit=9))) == ("queued", 1)
        store.update(job_id, Event("y", "small"), status="training")
        assert [event.seq for event in store.events(job_id, after=0, limit=9)] == [1, 2]
        store.close()


def test_a_job_is_as_it_was_after_the_file_is_opened_again(store: Store, tmp_path: Path) -> None:
    job_id = queue(store)
    store.update(job_id, Event("x", "said", {"a": [1]}, phase="training"), pid=3, error="e")
    before = store.require(job_id), store.events(job_id, after=0, limit=9)
    store.close()
    again = Store(tmp_path / "jobs.sqlite3")
    assert (again.require(job_id), again.events(job_id, after=0, limit=9)) == before
    again.close()


def test_what_clients_sent_is_readable_for_the_servers_user_only(store: Store, tmp_path: Path) -> None:
    queue(store)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("jobs.sqlite3*")}
    assert modes == {"jobs.sqlite3": 0o600, "jobs.sqlite3-wal": 0o600, "jobs.sqlite3-shm": 0o600}
    store.close()
    (tmp_path / "jobs.sqlite3").chmod(0o644)  # as an earlier version wrote it
    Store(tmp_path / "jobs.sqlite3").close()
    assert stat.S_IMODE((tmp_path / "jobs.sqlite3").stat().st_mode) == 0o600
