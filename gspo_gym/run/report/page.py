"""The page of a run: one HTML file that asks for nothing over the network.

Its data are compressed JSON, which the browser unpacks; nothing of a run becomes markup or script. The content security
policy allows the two blocks that are written here, by their digests, and nothing else. Curves are drawn by uPlot, which
is in the file with its licence.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import zlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Any

Json = Any  # the values of json.loads

_SCRIPTS = ("dom.js", "charts.js", "episodes.js", "main.js")


def saved_page(runs: Sequence[Mapping[str, Json]], steps: Sequence[Mapping[str, Json]]) -> str:
    """Return the page with its data in it.

    Args:
        runs: `page_data.run_values` of the run, and of runs whose curves are drawn beside its own.
        steps: `page_data.step_values` of the first run.

    Raises:
        ValueError: the data hold a NaN or an infinity.
    """
    text = json.dumps({"runs": runs, "steps": steps}, allow_nan=False, separators=(",", ":"))
    data = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    return _page(str(runs[0]["run"]["label"]), data, ("saved.js",), "default-src 'none'")


def live_page(title: str) -> str:
    """Return the page that asks the server it came from; see `cli/view.py`."""
    return _page(title, "", ("live.js",), "default-src 'none'; connect-src 'self'")


def _page(title: str, data: str, sources: Sequence[str], policy: str) -> str:
    assets = files("gspo_gym.run.report") / "assets"

    def read(name: str) -> str:
        return (assets / name).read_text(encoding="utf-8")

    style = read("uPlot.min.css") + read("page.css")
    licence = "\n".join(f" * {line}" for line in read("uPlot.LICENSE").splitlines())
    ours = "\n".join(read(name) for name in (*_SCRIPTS, *sources))
    script = f"/* uPlot:\n{licence}\n */\n{read('uPlot.iife.min.js')}\n{ours}"
    allowed = f"script-src '{_digest(script)}'; style-src '{_digest(style)}'; base-uri 'none'; form-action 'none'"
    return Template(read("page.html")).substitute(
        title=html.escape(f"{title} · gspo_gym"),
        policy=f"{policy}; {allowed}",
        style=style,
        data=data,
        script=script,
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
