"""A rank that sends back what it is told, twice over: `python -m tests.support.echo_rank`. It loads no torch."""

from __future__ import annotations

from gspo_gym.base.ranks import Rank


def main() -> None:
    rank = Rank.here()
    while True:
        head, bodies = rank.receive()
        doubled = [2 * body for body in bodies]
        rank.send({"rank": rank.rank, **head}, doubled, num_bodies=len(doubled))
        if head.get("end"):
            rank.end("was told to\nend")


if __name__ == "__main__":
    main()
