"""A rank that sends back what it is told, twice over: `python -m tests.support.echo_rank`. It loads no torch."""

from __future__ import annotations

import gc

from gspo_gym.base.ranks import Rank

was_collecting = gc.isenabled()  # while the program is imported


def main() -> None:
    rank = Rank.here()
    while True:
        head, bodies = rank.receive()
        doubled = [2 * body for body in bodies]
        seen = {"collects": [was_collecting, gc.isenabled()]} if head.get("tell") else {}
        rank.send({"rank": rank.rank, **head, **seen}, doubled, num_bodies=len(doubled))
        if head.get("end"):
            rank.end("was told to\nend")


if __name__ == "__main__":
    main()
