"""Placement: which part of a run stands on which node and takes which of its GPUs.

Pure: what a run needs and what nodes have free go in; the places, or a `PlacementError` in one sentence, come out. It
starts nothing and asks nothing, so a demand that cannot be met is an error at once, not a request that waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from gspo_gym.errors import PlacementError

GIB = 2**30
_MAX_STATES = 10_000  # of the search: seconds at most; a demand of ranks of one GPU takes one state a node
_MAX_NAMES = 4  # of alike nodes in an error


class Resources(NamedTuple):
    """What a piece takes, or what a node has free.

    >>> str(Resources(gpus=2, memory_bytes=3 * GIB))
    '2 GPUs, 3 GiB'
    """

    gpus: int = 0
    cores: int = 0
    memory_bytes: int = 0

    def __str__(self) -> str:
        shown = _shown(self)
        return ", ".join(text for text, amount in zip(shown, self, strict=True) if amount) or "nothing"


@dataclass(frozen=True, slots=True)
class Part:
    """`count` equal pieces of a run; each stands on one node whole, and different pieces need not.

    What must stand together is one piece: a vLLM replica of tensor_parallel x data_parallel GPUs, a learner rank of 1.
    """

    role: str
    count: int
    each: Resources


@dataclass(frozen=True, slots=True)
class Offer:
    """A node: the numbers of its free GPUs, its free cores and its free memory."""

    node: str
    gpus: tuple[int, ...] = ()
    cores: int = 0
    memory_bytes: int = 0
    address: str = ""

    @property
    def free(self) -> Resources:
        """Return the amounts."""
        return Resources(len(self.gpus), self.cores, self.memory_bytes)


@dataclass(frozen=True, slots=True)
class Place:
    """Where piece `number` of a role stands (from 0, in the order of the nodes), and its GPUs' numbers on that node."""

    role: str
    number: int
    node: str
    address: str
    gpus: tuple[int, ...]


def assign(parts: Sequence[Part], offers: Sequence[Offer]) -> tuple[Place, ...]:
    """Return a place for every piece, in the order of the parts; equal arguments give equal places.

    Earlier parts take the nodes with the most free GPUs, and few of them: put first what talks most, the learner's
    ranks. Within a node the largest pieces take the lowest GPU numbers, so that the GPUs of a replica lie together.

    Raises:
        PlacementError: there is no room; says what is missing and what is free on which node.
        ValueError: two nodes or two parts have one name, or an amount is negative.
    """
    _check(parts, offers)
    # Large nodes first: as few nodes as possible hold the ranks that exchange gradients.
    nodes = sorted(offers, key=lambda offer: offer.free, reverse=True)
    search = _Search([part.each for part in parts], [offer.free for offer in nodes])
    counts = tuple(part.count for part in parts)
    chosen = search.run(counts)
    if chosen is None:
        raise PlacementError(_explain(parts, offers, search, counts))
    found = [place for offer, pattern in zip(nodes, chosen, strict=False) for place in _allot(offer, parts, pattern)]
    numbered = []
    for part in parts:
        mine = [(offer, gpus) for role, offer, gpus in found if role == part.role]
        numbered += [Place(part.role, i, at.node, at.address, gpus) for i, (at, gpus) in enumerate(mine)]
    return tuple(numbered)


def only_counted(parts: Sequence[Part], offers: Sequence[Offer]) -> list[Part]:
    """Return the parts without the cores and the memory they take, where no node says how many it has."""
    counts = (1, int(any(o.cores for o in offers)), int(any(o.memory_bytes for o in offers)))
    return [
        replace(part, each=Resources(*(n * says for n, says in zip(part.each, counts, strict=True)))) for part in parts
    ]


def _check(parts: Sequence[Part], offers: Sequence[Offer]) -> None:
    for names in ([part.role for part in parts], [offer.node for offer in offers]):
        if len(set(names)) < len(names):
            raise ValueError(f"placement: a name stands there twice: {', '.join(sorted(names))}")
    amounts = [n for part in parts for n in (part.count, *part.each)] + [n for offer in offers for n in offer.free]
    if min(amounts, default=0) < 0:
        raise ValueError(f"placement: expected amounts of at least 0, got {min(amounts)}")


def _allot(offer: Offer, parts: Sequence[Part], pattern: Sequence[int]) -> Iterator[tuple[str, Offer, tuple[int, ...]]]:
    free = list(offer.gpus)
    for part, count in sorted(zip(parts, pattern, strict=True), key=lambda row: -row[0].each.gpus):
        for _ in range(count):
            taken, free = free[: part.each.gpus], free[part.each.gpus :]
            yield part.role, offer, tuple(taken)


class _Search:
    """Depth-first search over nodes: how many pieces of each part does each node take?

    Each node takes a pattern (a count a part) to which no further piece could be added. That loses no solution: a piece
    of a later node that would fit into an earlier one can be moved there.
    """

    def __init__(self, each: Sequence[Resources], nodes: Sequence[Resources]) -> None:
        self.each, self.nodes = each, nodes
        # Of the nodes from i on: their sum, and the pieces of each part that fit if there were no other parts.
        self.totals, self.room = [Resources()], [(0,) * len(each)]
        self.gave_up = False
        self.known: dict[tuple[Resources, tuple[int, ...]], list[tuple[int, ...]]] = {}
        for free in reversed(nodes):
            self.totals.append(Resources(*(a + b for a, b in zip(self.totals[-1], free, strict=True))))
            fits = (_num_fitting(one, free) for one in each)
            self.room.append(tuple(min(a + b, _MANY) for a, b in zip(self.room[-1], fits, strict=True)))
        self.totals.reverse()
        self.room.reverse()

    def run(self, counts: tuple[int, ...]) -> list[tuple[int, ...]] | None:
        """Return the patterns of the first nodes, which hold everything; None: there are none, or it gave up."""
        if not any(counts):
            return []
        if self.is_hopeless(0, counts):
            return None
        failed: set[tuple[int, tuple[int, ...]]] = set()
        chosen: list[tuple[int, ...]] = []
        left = [counts]
        # A stack and not recursion: there may be more nodes than Python's frames.
        stack = [iter(self.patterns(self.nodes[0], counts))]
        while stack:
            pattern = next(stack[-1], None)
            if pattern is None:
                stack.pop()
                failed.add((len(stack), left.pop()))
                if chosen:
                    chosen.pop()
                continue
            rest = tuple(a - b for a, b in zip(left[-1], pattern, strict=True))
            if not any(rest):
                return [*chosen, pattern]
            if (len(stack), rest) in failed or self.is_hopeless(len(stack), rest):
                continue
            if len(failed) > _MAX_STATES:
                self.gave_up = True
                return None
            chosen.append(pattern)
            left.append(rest)
            stack.append(iter(self.patterns(self.nodes[len(stack)], rest)))
        return None

    def is_hopeless(self, first: int, counts: Sequence[int]) -> bool:
        """Return whether the nodes from `first` on have too little of something, or too little room for a part."""
        if any(count > room for count, room in zip(counts, self.room[first], strict=True)):
            return True
        return any(needed > free for needed, free in zip(_sum(self.each, counts), self.totals[first], strict=True))

    def patterns(self, free: Resources, counts: Sequence[int]) -> list[tuple[int, ...]]:
        """Return a node's patterns that nothing can be added to, those with most of the earlier parts first."""
        # Nodes are alike, and so are counts beyond what fits: the same few lists come again and again.
        most = tuple(min(n, _num_fitting(one, free)) for one, n in zip(self.each, counts, strict=True))
        if (free, most) not in self.known:
            self.known[free, most] = list(self._patterns(free, most))
        return self.known[free, most]

    def _patterns(self, free: Resources, counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
        def extend(index: int, left: Resources) -> Iterator[tuple[int, ...]]:
            if index == len(self.each):
                yield ()
                return
            one, most = self.each[index], min(counts[index], _num_fitting(self.each[index], left))
            # The last part takes all it can: anything less could be added to.
            fewest = most if index == len(self.each) - 1 else 0
            for count in range(most, fewest - 1, -1):
                for others in extend(index + 1, _minus(left, one, count)):
                    yield (count, *others)

        for pattern in extend(0, free):
            left = _minus(free, _sum(self.each, pattern), 1)
            if not any(
                taken < count and _num_fitting(one, left)
                for one, count, taken in zip(self.each, counts, pattern, strict=True)
            ):
                yield pattern


_MANY = 10**9  # pieces that need nothing fit any number of times


def _num_fitting(one: Resources, free: Resources) -> int:
    return min((have // need for need, have in zip(one, free, strict=True) if need), default=_MANY)


def _minus(free: Resources, one: Resources, count: int) -> Resources:
    return Resources(*(have - need * count for have, need in zip(free, one, strict=True)))


def _sum(each: Sequence[Resources], counts: Sequence[int]) -> Resources:
    rows = [[amount * count for amount in one] for one, count in zip(each, counts, strict=True)]
    return Resources(*map(sum, zip(*rows, strict=True))) if rows else Resources()


def _explain(parts: Sequence[Part], offers: Sequence[Offer], search: _Search, counts: tuple[int, ...]) -> str:
    """Return what is missing, then what is free where."""
    free = _free_where([(offer.node, offer.free) for offer in offers])
    total = _sum(search.each, counts)
    missing = _minus(total, search.totals[0], 1)
    said = [
        f"{needs} are needed in all and {has} free: {less} missing"
        for needs, has, less, amount in zip(
            _shown(total), _shown(search.totals[0]), _shown(missing), missing, strict=True
        )
        if amount > 0
    ]
    said += [
        _too_few(part, room, offers) for part, room in zip(parts, search.room[0], strict=True) if room < part.count
    ]
    if said:
        return f"no room for the run: {'; '.join(said)}. Free: {free}"
    # Totals and parts alone would fit: say what one full arrangement leaves out, and what it leaves free.
    nodes = sorted(offers, key=lambda offer: offer.free, reverse=True)
    rest, over = counts, []
    for offer in nodes:
        pattern = search.patterns(offer.free, rest)[0]
        rest = tuple(a - b for a, b in zip(rest, pattern, strict=True))
        over.append((offer.node, _minus(offer.free, _sum(search.each, pattern), 1)))
    out = ", ".join(_counted(part, count) for part, count in zip(parts, rest, strict=True) if count)
    why = f"none found in {_MAX_STATES} tries" if search.gave_up else "in whatever order they are placed"
    return (
        f"no room for the run: every part would fit alone, but not all together ({why}); with the others placed, {out} "
        f"missing a place, and free are then: {_free_where(over)}. Free before: {free}"
    )


def _too_few(part: Part, room: int, offers: Sequence[Offer]) -> str:
    whole = f"{part.role}: {part.count} x ({part.each}), each on one node"
    if room:
        return f"{whole}: there is room for {room}, {part.count - room} missing"
    lacks = [(Resources(*(max(0, n) for n in _minus(part.each, offer.free, 1))), offer) for offer in offers]
    if not lacks:
        return f"{whole}: no node is offered"
    least, nearest = min(lacks, key=lambda row: row[0])
    return f"{whole}: no node has that: {least} more needed on {nearest.node} with {nearest.free} free"


def _counted(part: Part, count: int) -> str:
    return f"{count} of {part.count} {part.role} ({part.each} each)"


def _free_where(rows: Sequence[tuple[str, Resources]]) -> str:
    alike: dict[Resources, list[str]] = {}
    for name, free in rows:
        alike.setdefault(free, []).append(name)
    said = []
    for free, names in alike.items():
        shown = ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" * (len(names) > _MAX_NAMES))
        said.append(f"{free}{' each' * (len(names) > 1)} on {shown}")
    return "; ".join(said) or "no node"


def _shown(amounts: Resources) -> tuple[str, str, str]:
    gpus, cores, memory = amounts
    return f"{gpus} GPU{'s' * (gpus != 1)}", f"{cores} core{'s' * (cores != 1)}", f"{memory / GIB:.4g} GiB"
