"""Tests of the library's modules about lists, grids, graphs and containers."""

from __future__ import annotations

from collections.abc import Mapping

from .cases import Call, Cases, Draw, call, choosing


def _intervals(d: Draw) -> list[list[int]]:
    return [[start := d.number(0, 12), start + d.number(0, 4)] for _ in range(d.number(0, 5))]


def _cache(d: Draw) -> Call:
    steps = []
    for _ in range(d.number(3, 9)):
        key = d.one_of("abc")
        steps.append(("put", (key, d.number(1, 9))) if d.number(0, 1) else ("get", (key,)))
    return "LruCache", (d.number(1, 2),), (*steps, ("keys", ()))


def _heap(d: Draw) -> Call:
    steps: list[tuple[str, tuple[int, ...]]] = [("push", (d.number(1, 9),)) for _ in range(d.number(1, 7))]
    steps += [("pop", ()) for _ in range(d.number(1, 8))]
    steps += [("push", (d.number(0, 9),)), ("size", ()), ("pop", ())]
    return "MinHeap", (), tuple(steps)


def _product(d: Draw) -> Call:
    height, middle, width = d.number(1, 3), d.number(1, 3), d.number(1, 3)
    return call("multiply", d.matrix(height, middle), d.matrix(middle, width))


def _maze(d: Draw) -> Call:
    size = d.number(2, 5)
    rows = [d.text("...#", size, least=size) for _ in range(size)]
    rows[0], rows[-1] = "." + rows[0][1:], rows[-1][:-1] + "."
    return call("steps", rows, [0, 0], [size - 1, size - 1])


def _roads(d: Draw) -> list[list[int]]:
    return [[d.number(1, 5), d.number(1, 5), d.number(0, 9)] for _ in range(d.number(0, 8))]


def _needs(d: Draw) -> dict[str, list[str]]:
    names = "abcde"
    return {
        name: sorted({d.one_of(names[:index]) for _ in range(d.number(0, 2))})
        for index, name in enumerate(names)
        if index > 0 and d.number(0, 3)
    }


OF_STRUCTURES: Mapping[str, Cases] = {
    "intervals": Cases(
        (
            call("merge", [[5, 7], [1, 3], [3, 4]]),
            call("merge", []),
            call("merge", [[1, 9], [2, 3]]),
            call("common", [1, 5], [4, 9]),
            call("common", [1, 2], [3, 4]),
            call("common", [1, 2], [2, 4]),
            call("covered", [[1, 3], [2, 5], [8, 8]]),
        ),
        choosing(
            lambda d: call("merge", _intervals(d)),
            lambda d: call("covered", _intervals(d)),
            lambda d: call(
                "common", [a := d.number(0, 9), a + d.number(0, 4)], [b := d.number(0, 9), b + d.number(0, 4)]
            ),
        ),
    ),
    "lru_cache": Cases(
        (
            ("LruCache", (1,), (("put", ("a", 1)), ("put", ("b", 2)), ("get", ("a",)), ("get", ("b",)))),
            (
                "LruCache",
                (2,),
                (("put", ("a", 1)), ("put", ("b", 2)), ("get", ("a",)), ("put", ("c", 3)), ("keys", ())),
            ),
            ("LruCache", (2,), (("put", ("a", 1)), ("put", ("a", 5)), ("get", ("a",)), ("keys", ()))),
            (
                "LruCache",
                (2,),
                (("put", ("a", 1)), ("put", ("b", 2)), ("put", ("a", 3)), ("put", ("c", 4)), ("keys", ())),
            ),
        ),
        _cache,
    ),
    "matrix": Cases(
        (
            call("transpose", [[1, 2, 3], [4, 5, 6]]),
            call("multiply", [[1, 2], [3, 4]], [[0, 1], [1, 0]]),
            call("multiply", [[1, 2]], [[1, 2]]),
            call("determinant", [[1, 2], [3, 4]]),
            call("determinant", [[5]]),
            call("determinant", [[2, 0, 1], [1, 3, 2], [1, 1, 1]]),
        ),
        choosing(
            lambda d: call("transpose", d.matrix(d.number(1, 3), d.number(1, 3))),
            lambda d: call("determinant", d.matrix(size := d.number(1, 3), size)),
            _product,
        ),
    ),
    "spiral": Cases(
        (
            call("spiral", [[1, 2, 3], [4, 5, 6], [7, 8, 9]]),
            call("spiral", [[1, 2]]),
            call("spiral", [[1], [2]]),
            call("spiral", [[1, 2], [3, 4], [5, 6]]),
            call("rotate", [[1, 2], [3, 4]]),
            call("rotate", [[1, 2, 3]]),
        ),
        choosing(
            lambda d: call("spiral", d.matrix(d.number(1, 5), d.number(1, 5))),
            lambda d: call("rotate", d.matrix(d.number(1, 3), d.number(1, 3))),
        ),
    ),
    "maze": Cases(
        (
            call("steps", ["..", "#."], [0, 0], [1, 1]),
            call("steps", [".#."], [0, 0], [0, 2]),
            call("steps", ["."], [0, 0], [0, 0]),
            call("is_free", [".#"], 0, -1),
            call("is_free", [".#"], 0, 1),
            call("is_free", ["..", ".."], 2, 0),
            call("is_free", ["..", ".."], 1, 1),
            call("is_free", ["..", ".."], 0, 2),
            call("is_free", ["."], -1, 0),
        ),
        choosing(_maze, lambda d: call("is_free", d.grid(".#", 3), d.number(-1, 3), d.number(-1, 3))),
    ),
    "roads": Cases(
        (
            call("cheapest", [[1, 2, 5], [1, 3, 1], [3, 2, 2]], 1, 2),
            call("cheapest", [[1, 2, 5]], 2, 1),
            call("cheapest", [], 1, 1),
            call("reachable", [[1, 2, 5], [3, 1, 1]], 1),
            call("reachable", [], 4),
        ),
        choosing(
            lambda d: call("cheapest", _roads(d), d.number(1, 5), d.number(1, 5)),
            lambda d: call("reachable", _roads(d), d.number(1, 5)),
        ),
    ),
    "build_order": Cases(
        (
            call("build_order", {"app": ["lib", "core"], "lib": ["core"]}),
            call("build_order", {}),
            call("build_order", {"a": ["b"], "b": ["a"]}),
            call("build_order", {"b": [], "a": []}),
            call("depth", {"app": ["lib"], "lib": ["core"]}, "app"),
            call("depth", {}, "x"),
        ),
        choosing(
            lambda d: call("build_order", _needs(d)),
            lambda d: call("depth", _needs(d), d.one_of("abcde")),
        ),
    ),
    "islands": Cases(
        (
            call("count_groups", 4, [[0, 1], [2, 3], [1, 0]]),
            call("count_groups", 3, []),
            call("root", [1, 2, 2], 0),
            call("largest_island", ["xx.", "..x", "..x"]),
            call("largest_island", ["."]),
            call("largest_island", ["xxx", "x.x"]),
        ),
        choosing(
            lambda d: call("count_groups", 6, [[d.number(0, 5), d.number(0, 5)] for _ in range(d.number(0, 6))]),
            lambda d: call("largest_island", d.grid("x.", 5)),
        ),
    ),
    "sorted_search": Cases(
        (
            call("first_at_least", [1, 3, 3, 7], 3),
            call("first_at_least", [], 3),
            call("first_at_least", [1, 2], 5),
            call("count_between", [1, 3, 3, 7], 3, 6),
            call("count_between", [1, 2], 2, 1),
            call("nearest", [1, 4, 9], 6),
            call("nearest", [1, 3], 2),
            call("nearest", [5], 1),
            call("nearest", [5], 9),
        ),
        choosing(
            lambda d: call("first_at_least", sorted(d.numbers(8, 0, 9)), d.number(0, 10)),
            lambda d: call("count_between", sorted(d.numbers(8, 0, 9)), d.number(0, 9), d.number(0, 9)),
            lambda d: call("nearest", sorted(d.numbers(6, 0, 20, least=1)), d.number(0, 20)),
        ),
    ),
    "merge_sort": Cases(
        (
            call("merge", [1, 4], [2, 4, 6]),
            call("merge", [], [1]),
            call("merge", [2], []),
            call("merge_sort", [3, 1, 2]),
            call("merge_sort", []),
            call("inversions", [3, 1, 2]),
            call("inversions", [1, 1]),
        ),
        choosing(
            lambda d: call("merge", sorted(d.numbers(5, 0, 9)), sorted(d.numbers(5, 0, 9))),
            lambda d: call("merge_sort", d.numbers(8, 0, 9)),
            lambda d: call("inversions", d.numbers(6, 0, 5)),
        ),
    ),
    "windows": Cases(
        (
            call("window_sums", [1, 2, 3, 4], 2),
            call("window_sums", [1], 2),
            call("window_sums", [1], 0),
            call("window_sums", [4, 5], 2),
            call("best_run", [2, -1, 3, -9, 4]),
            call("best_run", []),
            call("best_run", [-3, -2]),
            call("longest_rise", [1, 3, 2, 4, 5, 5]),
            call("longest_rise", []),
            call("longest_rise", [7]),
        ),
        choosing(
            lambda d: call("window_sums", d.numbers(7, -5, 9), d.number(0, 4)),
            lambda d: call("best_run", d.numbers(7, -9, 6)),
            lambda d: call("longest_rise", d.numbers(8, 0, 5)),
        ),
    ),
    "min_heap": Cases(
        (
            ("MinHeap", (), (("push", (3,)), ("push", (1,)), ("push", (2,)), ("pop", ()), ("pop", ()), ("size", ()))),
            ("MinHeap", (), (("pop", ()), ("size", ()), ("push", (4,)), ("size", ()), ("pop", ()), ("pop", ()))),
            ("MinHeap", (), (*(("push", (n,)) for n in (5, 4, 3, 2, 1)), *(("pop", ()) for _ in range(5)))),
        ),
        _heap,
    ),
    "lists": Cases(
        (
            call("chunks", [1, 2, 3, 4, 5], 2),
            call("chunks", [], 3),
            call("chunks", [1], 0),
            call("chunks", [1, 2], 1),
            call("rotate", [1, 2, 3, 4], 1),
            call("rotate", [], 2),
            call("rotate", [1, 2, 3], -1),
            call("unique", [3, 1, 3, 2, 1]),
            call("pairs_with_sum", [1, 3, 2, 2], 4),
            call("pairs_with_sum", [2], 4),
        ),
        choosing(
            lambda d: call("chunks", d.numbers(7, 0, 9), d.number(0, 4)),
            lambda d: call("rotate", d.numbers(5, 0, 9), d.number(-7, 7)),
            lambda d: call("unique", d.numbers(7, 0, 4)),
            lambda d: call("pairs_with_sum", d.numbers(7, 0, 5), d.number(0, 8)),
        ),
    ),
    "game_of_life": Cases(
        (
            call("neighbours", ["xx", "x."], 0, 0),
            call("neighbours", ["xxx", "xxx", "xxx"], 1, 1),
            call("step", ["...", "xxx", "..."]),
            call("step", ["xx", "x."]),
            call("step", ["x"]),
            call("step", ["xxx", "xxx", "xxx"]),
        ),
        choosing(
            lambda d: call("step", d.grid("x.", 4)),
            lambda d: call("neighbours", d.grid("xx.", 4), 0, 0),
        ),
    ),
}
