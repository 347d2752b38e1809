"""Placement: which part of a run stands on which node and takes which of its GPUs.

Pure: what a run needs and what nodes have free go in; the places, or a `PlacementError` in one sentence, come out. It
starts nothing and asks nothing, so a demand that cannot be met is an error at once, not a request that waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from gspo_gym.errors import PlacementError

GIB = 2**30
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
    gpus: tuple[int, ...]


def assign(parts: Sequence[Part], offers: Sequence[Offer]) -> tuple[Place, ...]:
    """Return a place for every piece, in the order of the parts; equal arguments give equal places.

    Each part fills the nodes with the most free GPUs first, and few of them: put first what talks most, the learner's
    ranks. If not all find room so, the largest pieces are placed first. Within a node these take the lowest GPU
    numbers, so that the GPUs of a replica lie together. No search beyond that: Ray, which places a run in the end,
    makes none either, and a demand that fits only in another arrangement is refused.

    Raises:
        PlacementError: there is no room; says what is missing and what is free on which node.
        ValueError: two nodes or two parts have one name, or an amount is negative.
    """
    _check(parts, offers)
    nodes = sorted(offers, key=lambda offer: offer.free, reverse=True)
    filling = first = _fill(parts, nodes)
    if any(first.left.values()):
        filling = _fill(sorted(parts, key=lambda part: part.each, reverse=True), nodes)
    if any(filling.left.values()):
        raise PlacementError(_explain(parts, nodes, offers, first))
    rows = [row for offer, counts in zip(nodes, filling.counts, strict=True) for row in _allot(offer, parts, counts)]
    places = []
    for part in parts:
        mine = [(offer, gpus) for role, offer, gpus in rows if role == part.role]
        places += [Place(part.role, i, at.node, gpus) for i, (at, gpus) in enumerate(mine)]
    return tuple(places)


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


@dataclass(frozen=True, slots=True)
class _Filling:
    """What stands where: pieces by role and what is free, by node; and the pieces of each role without a place."""

    counts: list[dict[str, int]]
    free: list[Resources]
    left: dict[str, int]


def _fill(parts: Sequence[Part], nodes: Sequence[Offer]) -> _Filling:
    filling = _Filling([{} for _ in nodes], [node.free for node in nodes], {part.role: part.count for part in parts})
    for part in parts:
        for index, free in enumerate(filling.free):
            count = min(filling.left[part.role], _num_fitting(part.each, free))
            filling.counts[index][part.role] = count
            filling.free[index] = _minus(free, part.each, count)
            filling.left[part.role] -= count
    return filling


def _allot(
    offer: Offer, parts: Sequence[Part], counts: Mapping[str, int]
) -> Iterator[tuple[str, Offer, tuple[int, ...]]]:
    free = list(offer.gpus)
    for part in sorted(parts, key=lambda part: -part.each.gpus):
        for _ in range(counts[part.role]):
            taken, free = free[: part.each.gpus], free[part.each.gpus :]
            yield part.role, offer, tuple(taken)


_MANY = 10**9  # pieces that need nothing fit any number of times


def _num_fitting(one: Resources, free: Resources) -> int:
    return min((have // need for need, have in zip(one, free, strict=True) if need), default=_MANY)


def _minus(free: Resources, one: Resources, count: int) -> Resources:
    return Resources(*(have - need * count for have, need in zip(free, one, strict=True)))


def _sum(each: Sequence[Resources], counts: Sequence[int]) -> Resources:
    rows = [[amount * count for amount in one] for one, count in zip(each, counts, strict=True)]
    return Resources(*map(sum, zip(*rows, strict=True))) if rows else Resources()


def _explain(parts: Sequence[Part], nodes: Sequence[Offer], offers: Sequence[Offer], filling: _Filling) -> str:
    """Return what is missing, then what is free where."""
    free = _free_where([(offer.node, offer.free) for offer in offers])
    total = _sum([part.each for part in parts], [part.count for part in parts])
    room = _sum([offer.free for offer in offers], [1] * len(offers))
    missing = _minus(total, room, 1)
    reasons = [
        f"{needs} are needed in all and {has} free: {less} missing"
        for needs, has, less, amount in zip(_shown(total), _shown(room), _shown(missing), missing, strict=True)
        if amount > 0
    ]
    fitting = [(part, sum(_num_fitting(part.each, offer.free) for offer in offers)) for part in parts]
    reasons += [_too_few(part, most, offers) for part, most in fitting if most < part.count]
    if reasons:
        return f"no room for the run: {'; '.join(reasons)}. Free: {free}"
    # Totals and parts alone would fit: say what one arrangement leaves out, and what it leaves free.
    over = [(offer.node, rest) for offer, rest in zip(nodes, filling.free, strict=True)]
    out = ", ".join(_counted(part, count) for part in parts if (count := filling.left[part.role]))
    return (
        f"no room for the run: every part would fit alone, but not all together; with the others placed, {out} "
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
    texts = []
    for free, names in alike.items():
        shown = ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" * (len(names) > _MAX_NAMES))
        texts.append(f"{free}{' each' * (len(names) > 1)} on {shown}")
    return "; ".join(texts) or "no node"


def _shown(amounts: Resources) -> tuple[str, str, str]:
    gpus, cores, memory = amounts
    return f"{gpus} GPU{'s' * (gpus != 1)}", f"{cores} core{'s' * (cores != 1)}", f"{memory / GIB:.4g} GiB"
