"""A real Jupyter kernel, whose cells run in an event loop: runs are trained, opened and shown in it."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from playwright.sync_api import Page

CELLS = """
    import gspo_gym
    from gspo_gym.cli.authoring import make_card
    config = gspo_gym.RunConfig.from_dict({
        "model": {"base": "tiny:qwen3-64", "label": "note"},
        "rollout": {"env_name": "GuessNumber", "env_config": {"style": "terse"},
                    "max_turns": 2, "max_output_tokens": 2, "max_model_len": 256,
                    "episodes_per_batch": 4},
        "training": {"iterations_per_epoch": 1, "group_size": 2, "batch_size": 2, "learning_rate": 1e-3},
        "evaluation": {"seeds": "0:2"},
    })

    gspo_gym.run_training(config)["status"]

    gspo_gym.run_evaluation(config, "runs/note").num_episodes

    len(gspo_gym.collect_episodes("GuessNumber", "scripted:reference", seeds=[0, 1]).trajectories)

    make_card("GuessNumber", num_seeds=2).env_id

    run = gspo_gym.open_run("note"); run

    list(run.metrics.index), len(run.episodes(step=1, failed=True)) + len(run.episodes(step=1, failed=False))

    gspo_gym.open_run({quickstart!r}).show()
"""


@pytest.mark.nightly
def test_a_run_is_trained_opened_and_shown_in_a_notebook(page: Page, run: Path, tmp_path: Path) -> None:
    cells = textwrap.dedent(CELLS.replace("{quickstart!r}", repr(str(run)))).strip().split("\n\n")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    results = [_result(cell) for cell in notebook.cells]
    assert [each["text/plain"] for each in results[1:5]] == ["'completed'", "2", "2", "'gspo_gym/GuessNumber-v0'"]
    assert results[5]["text/plain"].startswith("Run('runs/note', completed, step 1, ")
    assert results[6]["text/plain"] == "([1], 4)"
    assert [output for output in notebook.cells[-1].outputs if output.output_type == "stream"] == []

    # A frame of the notebook's page, in which links lead to places in the frame.
    page.set_content(f"<title>notebook</title>{results[-1]['text/html']}")
    frame = page.frame_locator("iframe")
    frame.get_by_role("link", name="Episodes").click()
    frame.locator("article").wait_for()
    first = frame.locator("article").get_attribute("aria-label")
    frame.locator(".list button").nth(1).click()
    frame.locator(f'article:not([aria-label="{first}"])').wait_for()
    frame.get_by_role("button", name="Tokens").click()
    frame.locator("article > .turn .token.sampled").first.hover()
    assert "advantage" in frame.locator(".detail").inner_text()


def _result(cell: Any) -> dict[str, str]:
    """The value of a cell's last line, by type; {} if it has none (Any: nbformat is untyped)."""
    found = [output["data"] for output in cell.outputs if output.output_type == "execute_result"]
    return dict(found[0]) if found else {}
