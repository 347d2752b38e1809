"""The live cell of a training, in a real kernel: it is drawn while the run goes on, and empty when it has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CELL = """
from gspo_gym import GSPOTrainer
SMALL = {"training": {"iterations_per_epoch": 2, "batch_size": 8}, "rollout.episodes_per_batch": 16,
         "warmup.num_episodes": 16, "warmup.num_epochs": 1, "evaluation.seeds": "0:4"}
GSPOTrainer(env="GuessNumber", args=SMALL, label="live").train()["steps"]
"""


def test_the_live_cell_of_a_training_is_drawn_and_then_empty(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    drawn: list[str] = []

    class Watching(NotebookClient):
        def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
            if msg["msg_type"] in ("display_data", "update_display_data"):
                drawn.append(msg["content"]["data"].get("text/html", ""))
            return super().process_message(msg, cell, cell_index)

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    Watching(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = notebook.cells[0].outputs
    assert [output["data"]["text/plain"] for output in outputs if output["output_type"] == "execute_result"] == ["2"]
    assert [
        output["text"] for output in outputs if output["output_type"] == "stream" and output["name"] == "stderr"
    ] == []
    frames = [html for html in drawn if html.startswith("<pre>")]
    assert frames, drawn
    assert any("2 steps" in html or "/2" in html for html in frames), frames
    assert drawn.index("") < drawn.index(frames[0])  # the cell begins empty
    assert "" in drawn[drawn.index(frames[-1]) :]  # and ends so: no table of a run that is over stays in the notebook
