"""The live line of `GSPOTrainer.train()` in a notebook, as its kernel sends it and as the saved notebook keeps it."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

# An episode begins after 1.2 s: a step, whose episodes begin together, is longer than two redraws on any machine.
CELLS = """
    import asyncio
    from gspo_gym import GSPOTrainer, TextEnv

    class Late(TextEnv):
        async def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            await asyncio.sleep(1.2)
            return "Say A.", {}

        async def step(self, action):
            return "", float("A" in action), True, False, {}

    class StepFailed(Exception):
        pass

    def fails(report):
        if report.step == 2:
            raise StepFailed("planted")

    args = {"rollout.max_output_tokens": 4, "rollout.episodes_per_batch": 8, "rollout.max_concurrent_rollouts": 8,
            "training.group_size": 4, "training.batch_size": 8, "training.iterations_per_epoch": 3,
            "optimizer.warmup_steps": 0, "evaluation.seeds": "0:2", "evaluation.every_n_iters": 3}

    GSPOTrainer("tiny:qwen3-64-v2", Late, args=args, label="whole").train()["status"]

    GSPOTrainer("tiny:qwen3-64-v2", Late, args=args, label="failed", callbacks=[fails]).train()
"""


class _Listener(NotebookClient):
    """Executes a notebook and keeps what its kernel sends of each cell's outputs."""

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        self.sent.setdefault(cell_index, []).append(msg)
        return super().process_message(msg, cell, cell_index)


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, list[dict[str, Any]], Path]]:
    """The two cells that train: each as saved, the messages of its display that is updated, and the run's folder."""
    folder = tmp_path_factory.mktemp("notebook")
    parts = textwrap.dedent(CELLS).strip().split("\n\n")
    setup, trained = "\n\n".join(parts[:-2]), parts[-2:]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in (setup, *trained)])
    client = _Listener(notebook, timeout=None, allow_errors=True, resources={"metadata": {"path": str(folder)}})
    client.sent = {}
    client.execute()
    found = []
    for index, label in ((1, "whole"), (2, "failed")):
        shown = [each for each in client.sent[index] if each["content"].get("transient", {}).get("display_id")]
        found.append((notebook.cells[index], shown, folder / "runs" / label))
    return found


def test_one_display_is_redrawn_at_most_twice_a_second(cells):
    for _, shown, _ in cells:
        kinds = [message["msg_type"] for message in shown]
        assert kinds == ["display_data"] + ["update_display_data"] * (len(kinds) - 1)
        assert len({message["content"]["transient"]["display_id"] for message in shown}) == 1
        seconds = (shown[-1]["header"]["date"] - shown[0]["header"]["date"]).total_seconds()
        # one each 0.5 s, the first, and the last, which does not wait
        assert 4 <= len(shown) <= seconds / 0.5 + 2


def test_the_line_has_the_numbers_of_the_step_that_ended_and_what_is_being_done(cells):
    for _, shown, folder in cells:
        texts = [message["content"]["data"]["text/plain"] for message in shown]
        assert [_row(text) for text in texts if "reward" in text] == [
            _recorded(folder, int(_row(text)["step"][0])) for text in texts if "reward" in text
        ]
        assert any("step 2/3: playing 0 of 8" in text and _row(text)["step"] == "1/3" for text in texts)
        for message in shown:
            data = message["content"]["data"]
            assert set(data) == {"text/plain", "text/html"}
            assert data["text/html"] == f"<pre>{data['text/plain']}</pre>"  # nothing to escape in it


def test_the_saved_notebook_keeps_the_last_steps_numbers_and_few_outputs(cells):
    (whole, _, folder), (failed, _, failed_folder) = cells
    for cell, path, last in ((whole, folder, 3), (failed, failed_folder, 2)):
        (kept,) = [output for output in cell.outputs if "reward" in output.get("data", {}).get("text/plain", "")]
        assert kept.output_type == "display_data"
        title, numbers = kept.data["text/plain"].splitlines()
        assert _row(f"{title}\n{numbers}") == _recorded(path, last)
        assert len(cell.outputs) <= 8
    # the display, the estimate, two evaluations and the status; transformers warns where ipywidgets is not installed
    assert whole.outputs[-1].data["text/plain"] == "'completed'"
    assert failed.outputs[-1].ename == "StepFailed"


def _row(text: str) -> dict[str, str]:
    """Return the row of numbers that a text begins with, without the time that is left."""
    titles, numbers, *_ = (line.split() for line in text.splitlines())
    return {title: number for title, number in zip(titles, numbers, strict=True) if title != "left"}


def _recorded(folder: Path, step: int) -> dict[str, str]:
    """Return the same row from the run's records."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if row["step"] == step]
    clipped = row["clip/low_fraction"] + row["clip/high_fraction"]
    success = f"{row['rollout/success_rate']:.0%}" if "rollout/success_rate" in row else "-"
    return {
        "step": f"{step}/3",
        "reward": f"{row['rollout/reward_mean']:.3f}",
        "success": success,
        "ratio": f"{row['ratio/mean']:.5f}",
        "clipped": f"{clipped:.1%}",
        "entropy": f"{row['policy/entropy']:.3f}",
        "tok/s": f"{row['rollout/sampled_tokens_per_second']:,.0f}",
    }
