"""The original chat templates that trl ships: the page says what becomes of each, and transformers reads the same."""

from __future__ import annotations

import pytest
from chat_families import tokenizer_of
from door_episode import play_door
from template_tables import TOOLS, counts, outcome, section, trl_table, trl_templates

from gspo_gym.chat.renderer import Renderer
from gspo_gym.errors import TemplateError
from gspo_gym.types import Message, ToolCall

# Without quotes, which trl's response template of LFM2 misreads.
CALL = (ToolCall("call_0", "look", {"text": "the red one, 5th é 🙂"}),)
ANSWERS = (
    Message("assistant", "", tool_calls=CALL),
    Message("assistant", "", tool_calls=CALL, reasoning_content="Hm.\n\nSo."),
    Message("assistant", "Seven.\n\nOr 8."),
    Message("assistant", "Seven.", reasoning_content="Hm."),
)


@pytest.mark.parametrize("path", trl_templates(), ids=lambda path: path.stem)
def test_transformers_reads_of_an_answer_what_we_read(path):
    """By trl's response template of the family, where it has one."""
    from trl.chat_template_utils import add_response_schema

    tokenizer = tokenizer_of(path.read_text(encoding="utf-8"))
    try:
        renderer = Renderer(tokenizer, tool_schemas=TOOLS, tools_in="template")
        add_response_schema(tokenizer)
    except TemplateError as refused:
        pytest.skip(f"refused: {refused}")
    except ValueError:
        pytest.skip("trl has no response template of this family")
    prompt = renderer.start([Message("user", "Go.")])
    num_read = 0
    for message in ANSWERS:
        try:
            ids = renderer.action_ids(message)
        except TemplateError:  # the template cannot write it
            continue
        ours = renderer.parse(renderer.decode(ids), is_truncated=False)
        assert isinstance(ours, Message)
        # GLM ends an answer with the token that opens the next turn, which transformers takes for text.
        said = ids[:-1] if path.stem == "glm4moe" else ids
        theirs = tokenizer.parse_response(said, prefix=prompt, tools=list(TOOLS))
        assert [call["function"] for call in theirs.get("tool_calls", [])] == [
            {"name": call.name, "arguments": call.arguments} for call in ours.tool_calls
        ]
        reasoning = theirs.get("reasoning_content") or theirs.get("thinking") or ""
        # trl has no reasoning of Llama 3, whose models have none.
        if path.stem not in ("llama3_1", "llama3_2") or message.reasoning_content is None:
            assert (theirs.get("content") or "", reasoning) == (ours.content, ours.reasoning_content or "")
        num_read += 1
    assert num_read >= 2


@pytest.mark.parametrize("path", trl_templates(), ids=lambda path: path.stem)
def test_a_scripted_episode_earns_all_that_there_is(path):
    template = path.read_text(encoding="utf-8")
    if outcome(template, "template").startswith("refused"):
        pytest.skip("refused")
    trajectory = play_door(template)
    assert (trajectory.error, trajectory.reward, len(trajectory.turns)) == (None, 1.0, 2)


def test_the_page_says_what_becomes_of_each_template():
    table = trl_table()
    assert len(table) == 41 + 2
    assert section("Templates of trl") == table
    assert counts(table) == "41 templates: 25 read back, 16 refused"
