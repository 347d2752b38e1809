"""Who owns which slot of the cache: requests in work, and sessions that wait for their next turn.

Slots of waiting sessions are given away least recently used first when nothing else is left; their session then starts
over by reading its prompt again. Bookkeeping only, no tensors; called by the batcher.
"""

from __future__ import annotations

from collections import OrderedDict


class SlotTable:
    """Slots 0 .. max_slots - 1, each free, in work, or kept for a session between two of its requests.

    Low numbers are handed out first, so that the slots in work lie close together and can be read in place.
    """

    def __init__(self, max_slots: int) -> None:
        self._max_slots = max_slots
        self._free = set(range(max_slots))
        self._kept: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._session_of: dict[int, str] = {}  # of slots in work

    @property
    def num_used(self) -> int:
        """Slots in work or kept."""
        return self._max_slots - len(self._free)

    @property
    def num_in_work(self) -> int:
        return self.num_used - len(self._kept)

    def is_used(self, slot: int) -> bool:
        """Whether the slot is in work or kept."""
        return slot not in self._free

    def acquire(self, session_id: str | None) -> int | None:
        """A slot for a request: its session's own, else a free one, else the longest-waiting session's; None if none.

        If another request of the same session is in work, this one is served as if it had no session.
        """
        slot = self._kept.pop(session_id, None) if session_id is not None else None
        if slot is None and self._free:
            slot = min(self._free)
            self._free.remove(slot)
        if slot is None and self._kept:
            _, slot = self._kept.popitem(last=False)
        if slot is not None and session_id is not None and session_id not in self._session_of.values():
            self._session_of[slot] = session_id
        return slot

    def kept_slot(self, session_id: str | None) -> int | None:
        """The slot that waits for the session's next request, if there is one."""
        return self._kept.get(session_id) if session_id is not None else None

    def release(self, slot: int) -> None:
        """The request in this slot is done: keep the slot for its session, or free it."""
        session_id = self._session_of.pop(slot, None)
        if session_id is None:
            self._free.add(slot)
        else:
            self._kept[session_id] = slot

    def end_session(self, session_id: str) -> None:
        """Free the session's slot, at once or when its request is done. Unknown sessions are fine."""
        slot = self._kept.pop(session_id, None)
        if slot is not None:
            self._free.add(slot)
        self._session_of = {slot: other for slot, other in self._session_of.items() if other != session_id}

    def forget_sessions(self) -> None:
        """Free the slots of all waiting sessions: what they hold is of no more use."""
        self._free.update(self._kept.values())
        self._kept.clear()
