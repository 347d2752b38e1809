"""Placement: nothing is overbooked, and only what is impossible is refused."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_gym.cluster.placement import GIB, Offer, Part, Place, Resources, assign
from gspo_gym.errors import PlacementError

SMALL = st.integers(0, 3)
RESOURCES = st.builds(Resources, SMALL, SMALL, SMALL)
DEMANDS = st.lists(st.tuples(st.integers(0, 3), RESOURCES), min_size=1, max_size=3)
FREE = st.lists(st.builds(Resources, st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)), max_size=3)


def node(name: str, gpus: int, cores: int = 0, memory_bytes: int = 0) -> Offer:
    return Offer(name, tuple(range(gpus)), cores, memory_bytes)


def brute_force(pieces: Sequence[Resources], free: Sequence[Resources]) -> bool:
    """Whether any of the len(free) ** len(pieces) ways to put pieces on nodes holds."""
    for where in itertools.product(range(len(free)), repeat=len(pieces)):
        taken = [[0, 0, 0] for _ in free]
        for piece, at in zip(pieces, where, strict=True):
            taken[at] = [a + b for a, b in zip(taken[at], piece, strict=True)]
        if all(a <= b for row, has in zip(taken, free, strict=True) for a, b in zip(row, has, strict=True)):
            return True
    return not pieces


def check_places(parts: Sequence[Part], offers: Sequence[Offer], places: Sequence[Place]) -> None:
    """Every piece has one place with its GPUs, no GPU has two pieces, and no node gives more than it has."""
    assert [(p.role, p.number) for p in places] == [(p.role, i) for p in parts for i in range(p.count)]
    each = {part.role: part.each for part in parts}
    for offer in offers:
        here = [place for place in places if place.node == offer.node]
        gpus = [gpu for place in here for gpu in place.gpus]
        assert set(gpus) <= set(offer.gpus)
        assert len(set(gpus)) == len(gpus)
        assert sum(each[place.role].cores for place in here) <= offer.cores
        assert sum(each[place.role].memory_bytes for place in here) <= offer.memory_bytes
    assert all(len(place.gpus) == each[place.role].gpus for place in places)


@settings(deadline=None)  # a busy machine is no failure
@given(DEMANDS, FREE)
def test_a_demand_is_met_without_overbooking_and_refused_only_if_no_arrangement_holds_it(
    demand: list[tuple[int, Resources]], free: list[Resources]
) -> None:
    parts = [Part(f"part-{i}", count, each) for i, (count, each) in enumerate(demand)]
    offers = [node(f"node-{i}", *has) for i, has in enumerate(free)]
    possible = brute_force([part.each for part in parts for _ in range(part.count)], free)
    if possible:
        places = assign(parts, offers)
        check_places(parts, offers, places)
        assert assign(parts, offers) == places
    else:
        with pytest.raises(PlacementError, match=r"missing|needed|no node"):
            assign(parts, offers)


def test_512_gpus_over_64_nodes_leave_none_free_and_replicas_stand_on_one_node_each() -> None:
    parts = [
        Part("learner", 128, Resources(1, 4, 64 * GIB)),
        Part("replica", 47, Resources(8, 8, 32 * GIB)),
        Part("reference", 2, Resources(4, 4, 16 * GIB)),
        Part("environments", 2048, Resources(0, 1, GIB)),
    ]
    offers = [node(f"node-{i:02}", 8, 96, 1024 * GIB) for i in range(64)]
    places = assign(parts, offers)
    check_places(parts, offers, places)
    assert Counter(len(place.gpus) for place in places) == {1: 128, 8: 47, 4: 2, 0: 2048}
    assert sum(len(place.gpus) for place in places) == 512
    # The ranks that exchange gradients take 16 whole nodes, and are numbered along them.
    learners = Counter(place.node for place in places if place.role == "learner")
    assert learners == {f"node-{i:02}": 8 for i in range(16)}
    assert [place.gpus for place in places[:8]] == [(gpu,) for gpu in range(8)]


def test_parts_that_come_first_take_the_largest_nodes_unless_a_later_one_needs_them() -> None:
    learner, replica = Part("learner", 8, Resources(1)), Part("replica", 1, Resources(8))
    offers = [node("small", 4), node("other", 4), node("large", 8)]
    assert {place.node for place in assign([learner], offers)} == {"large"}
    places = assign([learner, replica], offers)
    assert [place.node for place in places] == ["small"] * 4 + ["other"] * 4 + ["large"]


def test_the_gpus_of_a_replica_are_the_first_free_ones_of_its_node() -> None:
    offer = Offer("a", (1, 2, 5, 6, 7), address="10.0.0.1")
    places = assign([Part("learner", 1, Resources(1)), Part("replica", 2, Resources(2))], [offer])
    assert [(p.role, p.number, p.gpus, p.address) for p in places] == [
        ("learner", 0, (7,), "10.0.0.1"),
        ("replica", 0, (1, 2), "10.0.0.1"),
        ("replica", 1, (5, 6), "10.0.0.1"),
    ]


@pytest.mark.parametrize(
    ("parts", "offers", "message"),
    [
        (
            [Part("learner", 4, Resources(1, 1, 2 * GIB)), Part("replica", 1, Resources(4))],
            [node("a", 4, 8, 64 * GIB), node("b", 2, 8, 64 * GIB)],
            "no room for the run: 8 GPUs are needed in all and 6 GPUs free: 2 GPUs missing. "
            "Free: 4 GPUs, 8 cores, 64 GiB on a; 2 GPUs, 8 cores, 64 GiB on b",
        ),
        (
            [Part("replica", 1, Resources(6))],
            [node(f"n{i}", 4) for i in range(6)],
            "no room for the run: replica: 1 x (6 GPUs), each on one node: no node has that: 2 GPUs more needed on n0 "
            "with 4 GPUs free. Free: 4 GPUs each on n0, n1, n2, n3 and 2 more",
        ),
        (
            [Part("replica", 3, Resources(3))],
            [node("a", 5), node("b", 5)],
            "no room for the run: replica: 3 x (3 GPUs), each on one node: there is room for 2, 1 missing. "
            "Free: 5 GPUs each on a, b",
        ),
        ([Part("replica", 2, Resources(2)), Part("reference", 1, Resources(3))], [node("a", 3), node("b", 4)], None),
        (
            [Part("replica", 1, Resources(3)), Part("reference", 2, Resources(2))],
            [node("a", 3), node("b", 3), node("c", 1)],
            "no room for the run: every part would fit alone, but not all together (in whatever order they are "
            "placed); with the others placed, 1 of 2 reference (2 GPUs each) missing a place, and free are then: "
            "nothing on a; 1 GPU each on b, c. Free before: 3 GPUs each on a, b; 1 GPU on c",
        ),
        (
            [Part("learner", 1, Resources())],
            [],
            "no room for the run: learner: 1 x (nothing), each on one node: no node is offered. Free: no node",
        ),
    ],
)
def test_a_refusal_names_what_is_missing_and_what_is_free_where(
    parts: list[Part], offers: list[Offer], message: str | None
) -> None:
    if message is None:
        check_places(parts, offers, assign(parts, offers))
        return
    with pytest.raises(PlacementError) as caught:
        assign(parts, offers)
    assert str(caught.value) == message


def test_a_search_that_is_given_up_says_so() -> None:
    # 990 of 1040 GPUs in pieces of three sizes: an exact answer may take hours, and a launcher does not wait for it.
    parts = [Part(str(gpus), 66, Resources(gpus)) for gpus in (3, 5, 7)]
    with pytest.raises(PlacementError, match=r"not all together \(none found in 10000 tries\)"):
        assign(parts, [node(f"n{i:02}", 16) for i in range(65)])


@pytest.mark.parametrize(
    ("parts", "offers"),
    [
        ([Part("a", 1, Resources(1))] * 2, []),
        ([], [node("a", 1)] * 2),
        ([Part("a", -1, Resources(1))], []),
        ([], [Offer("a", (), -1)]),
    ],
)
def test_names_that_stand_twice_and_negative_amounts_are_errors(parts: list[Part], offers: list[Offer]) -> None:
    with pytest.raises(ValueError, match="placement: "):
        assign(parts, offers)
