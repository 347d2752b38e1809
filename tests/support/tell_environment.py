"""A process that writes its environment into the file TELL: `python -m tests.support.tell_environment`."""

from __future__ import annotations

import json
import os
from pathlib import Path

if __name__ == "__main__":
    Path(os.environ["TELL"]).write_text(json.dumps(dict(os.environ)), encoding="utf-8")
