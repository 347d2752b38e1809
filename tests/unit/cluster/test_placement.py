"""Placement: nothing is overbooked, and what a run asks of alike nodes has its place."""

from __future__ import annotations

import contextlib
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
def test_a_demand_is_met_without_overbooking_or_refused(
    demand: list[tuple[int, Resources]], free: list[Resources]
) -> None:
    parts = [Part(f"part-{i}", count, each) for i, (count, each) in enumerate(demand)]
    offers = [node(f"node-{i}", *has) for i, has in enumerate(free)]
    places: Sequence[Place] = ()
    with contextlib.suppress(PlacementError):
        places = assign(parts, offers)
    if not places:
        return
    check_places(parts, offers, places)
    assert assign(parts, offers) == places


@settings(deadline=None)
@given(st.integers(1, 4), st.data())
def test_powers_of_two_that_are_no_more_than_the_gpus_of_alike_nodes_always_have_a_place(
    num_nodes: int, data: st.DataObject
) -> None:
    left, parts = 8 * num_nodes, []
    for size in data.draw(st.permutations([1, 2, 4, 8])):  # the largest first fills each node without a gap
        count = data.draw(st.integers(0, left // size))
        parts.append(Part(str(size), count, Resources(size)))
        left -= count * size
    offers = [node(f"node-{i}", 8) for i in range(num_nodes)]
    check_places(parts, offers, assign(parts, offers))


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
    offer = Offer("a", (1, 2, 5, 6, 7))
    places = assign([Part("learner", 1, Resources(1)), Part("replica", 2, Resources(2))], [offer])
    assert [(p.role, p.number, p.gpus) for p in places] == [
        ("learner", 0, (7,)),
        ("replica", 0, (1, 2)),
        ("replica", 1, (5, 6)),
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
            "no room for the run: every part would fit alone, but not all together; with the others placed, "
            "1 of 2 reference (2 GPUs each) missing a place, and free are then: nothing on a; 1 GPU each on b, c. Free "
            "before: 3 GPUs each on a, b; 1 GPU on c",
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
