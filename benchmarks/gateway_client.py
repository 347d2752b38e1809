"""The agents of `python -m benchmarks gateway`, in a process of their own, with a plan on stdin.

HTTP/1.1 by hand over kept connections, so that the gateway is measured and not a client. Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any
from urllib.parse import urlsplit

SYSTEM = "You play a guessing game. Answer with one number and nothing else. " * 6
OBSERVATION = "Turn {turn}: your last guess was too high; the number is between 1 and {bound}. Guess again."

_LENGTH = b"content-length: "


async def play_all(plan: dict[str, Any]) -> dict[str, Any]:
    """Play all episodes at once; the seconds that each call took, and all of it (Any: JSON)."""
    seconds: list[float] = []
    started = time.perf_counter()
    await asyncio.gather(
        *(_play(url, pauses, seconds) for url, pauses in zip(plan["urls"], plan["pauses"], strict=True))
    )
    return {"seconds": seconds, "wall_seconds": time.perf_counter() - started}


async def _play(url: str, pauses: list[float], seconds: list[float]) -> None:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = (
        f"POST {parts.path}?{parts.query} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
        "accept: application/json\r\nauthorization: Bearer none\r\nx-stainless-retry-count: 0\r\ncontent-length: "
    ).encode()
    messages = [{"role": "system", "content": SYSTEM}]
    for turn, pause in enumerate(pauses):
        await asyncio.sleep(pause)  # the environment's time
        messages.append({"role": "user", "content": OBSERVATION.format(turn=turn, bound=1000 - turn)})
        body = json.dumps({"model": "policy", "messages": messages, "temperature": 1.0}).encode()
        started = time.perf_counter()
        writer.write(b"%s%d\r\n\r\n%s" % (head, len(body), body))
        answer = await reader.readuntil(b"\r\n\r\n")
        length = int(answer[answer.index(_LENGTH) + len(_LENGTH) :].split(b"\r", 1)[0])
        answer = await reader.readexactly(length)
        seconds.append(time.perf_counter() - started)
        messages.append(json.loads(answer)["choices"][0]["message"])
    writer.close()
    await writer.wait_closed()


if __name__ == "__main__":
    print(json.dumps(asyncio.run(play_all(json.load(sys.stdin)))))
