"""Tools and system texts for templates that show none: what the model reads, and what of it is read back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gspo_gym.chat.parsing import ParseFailure
from gspo_gym.chat.renderer import Renderer, RendererCache
from gspo_gym.config.build.token_audit import check_drift
from gspo_gym.env.registry import make
from gspo_gym.errors import TemplateError
from gspo_gym.rollout.actors import ScriptedActor
from gspo_gym.rollout.episode import EpisodeRequest, run_episode
from gspo_gym.rollout.limits import EpisodeLimits
from gspo_gym.types import Message, ParseStatus, Task, ToolCall

Build = Callable[..., Any]
Schemas = list[dict[str, Any]]

TOLD = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{"type": "function", "function": {"name": "guess", "description": "Guess the hidden number.", "parameters": \
{"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}}}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
GUESS = '<tool_call>\n{"name": "guess", "arguments": {"number": 7, "why": "é \\"<|im_end|>\\"\\n"}}\n</tool_call>'
CALLS = tuple(ToolCall(f"call_{i}", "guess", {"number": 7, "why": 'é "<|im_end|>"\n'}) for i in range(2))
SYSTEM, USER = Message("system", "Be brief."), Message("user", "Guess.")
RESULTS = [Message("tool", text, tool_call_id=f"call_{i}", name="guess") for i, text in enumerate(("higher", "lower"))]
# As such a conversation stands in a template with a system role, and in one without.
PLAIN = [
    {"role": "system", "content": f"Be brief.\n\n{TOLD}"},
    {"role": "user", "content": "Guess."},
    {"role": "assistant", "content": f"Well.\n{GUESS}\n{GUESS}"},
    {
        "role": "user",
        "content": "<tool_response>\nhigher\n</tool_response>\n<tool_response>\nlower\n</tool_response>\n\nGo on.",
    },
]
WITHOUT_SYSTEM = [{"role": "user", "content": f"Be brief.\n\n{TOLD}\n\nGuess."}, *PLAIN[2:]]


@pytest.mark.parametrize(
    ("template", "plain"), [("smollm2", PLAIN), ("chatml", PLAIN), ("gemma2", WITHOUT_SYSTEM), ("qwen25", PLAIN)]
)
def test_tools_stand_in_the_system_message_and_results_are_said_by_the_user(
    build_tokenizer: Build, tool_schemas: Schemas, template: str, plain: list[dict[str, str]]
) -> None:
    tokenizer = build_tokenizer(template)
    renderer = Renderer(tokenizer, tool_schemas=tool_schemas, tools_in="system_message")
    answer = Message("assistant", "Well.", CALLS)
    history, heard = [SYSTEM, USER], [*RESULTS, Message("user", "Go on.")]

    def rendered(messages: list[dict[str, str]]) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    assert tokenizer.decode(renderer.start(history)) == rendered(plain[:-2])
    sampled = renderer.action_ids(answer)
    assert renderer.decode(sampled) == f"Well.\n{GUESS}\n{GUESS}"
    assert sampled.index(renderer.stop_token_ids[0]) == len(sampled) - 1, "what looks like a stop in a call is text"
    assert renderer.parse(renderer.decode(sampled), is_truncated=False) == answer
    step = renderer.continue_from([*history, answer], heard, closed=True)
    assert not step.is_new_segment
    tokens = [*renderer.start(history), *sampled, *step.token_ids]
    assert tokenizer.decode(tokens) == rendered(plain)
    assert renderer.extends_over_tools


def test_without_a_system_message_the_tools_are_one(build_tokenizer: Build, tool_schemas: Schemas) -> None:
    tokenizer = build_tokenizer("smollm2")
    text = tokenizer.decode(Renderer(tokenizer, tool_schemas=tool_schemas).start([USER]))
    assert text == f"<|im_start|>system\n{TOLD}<|im_end|>\n<|im_start|>user\nGuess.<|im_end|>\n<|im_start|>assistant\n"


def test_the_template_has_the_tools_where_it_shows_them_and_the_system_message_elsewhere(
    build_tokenizer: Build, tool_schemas: Schemas
) -> None:
    for name, is_shown in (("qwen25", True), ("llama31", True), ("smollm2", False), ("gemma2", False)):
        tokenizer = build_tokenizer(name)
        auto, plain = Renderer(tokenizer, tool_schemas=tool_schemas), Renderer(tokenizer)
        assert (auto.notice is None) == is_shown, name
        assert plain.notice is None, "without tools there is nothing to say"
        if is_shown:
            in_template = Renderer(tokenizer, tool_schemas=tool_schemas, tools_in="template")
            assert auto.start([USER]) == in_template.start([USER])
            continue
        in_system = Renderer(tokenizer, tool_schemas=tool_schemas, tools_in="system_message")
        assert in_system.notice is None, "as it was asked for"
        assert auto.start([USER]) == in_system.start([USER])
        with pytest.raises(TemplateError, match=r'does not show tools.*rollout.tools_in = "system_message"'):
            Renderer(tokenizer, tool_schemas=tool_schemas, tools_in="template")


def test_a_call_that_is_nearly_right_or_cut_off_is_a_failure(build_tokenizer: Build, tool_schemas: Schemas) -> None:
    renderer = Renderer(build_tokenizer("smollm2"), tool_schemas=tool_schemas)
    for text, is_truncated, status in (
        ('<tool_call>{"name": "guess", "arguments": {"number": 7}}', False, ParseStatus.BAD_TOOL_CALL),
        ('<tool_call>{"name": "guess", "argum', True, ParseStatus.TRUNCATED),
        ('<tool_call>{"name": "guess"}</tool_call>', False, ParseStatus.BAD_TOOL_CALL),
    ):
        failure = renderer.parse(text, is_truncated=is_truncated)
        assert isinstance(failure, ParseFailure)
        assert failure.status is status


def test_a_call_can_be_forced_there_too(build_tokenizer: Build, tool_schemas: Schemas) -> None:
    renderer = Renderer(build_tokenizer("smollm2"), tool_schemas=tool_schemas)
    assert renderer.decode(renderer.call_opening("guess")) == '<tool_call>\n{"name": "guess", "arguments":'


def test_a_system_text_stands_before_the_first_user_message_where_the_template_has_no_such_role(
    build_tokenizer: Build,
) -> None:
    tokenizer = build_tokenizer("gemma2")
    renderer = Renderer(tokenizer)
    for said, turns in (
        ([SYSTEM, USER], ["Be brief.\n\nGuess."]),
        ([SYSTEM], ["Be brief."]),
        ([SYSTEM, USER, Message("assistant", "7"), SYSTEM, USER], ["Be brief.\n\nGuess.", "Be brief.\n\nGuess."]),
    ):
        text = tokenizer.decode(renderer.start(said))
        heard = [part.partition("<end_of_turn>")[0] for part in text.split("<start_of_turn>user\n")[1:]]
        assert heard == turns
    answer = Message("assistant", "7")
    step = renderer.continue_from([SYSTEM, USER, answer], [SYSTEM, Message("user", "Higher.")], closed=True)
    assert not step.is_new_segment
    assert "user\nBe brief.\n\nHigher.<end_of_turn>" in tokenizer.decode(step.token_ids)


# Mistral's template shows tools, and a system text until a tool has answered.
@pytest.mark.parametrize("template", ["smollm2", "gemma2", "mistral_v3"])
@pytest.mark.parametrize("env_name", ["SqlAnalyst", "SupportDesk"])
def test_an_environment_with_tools_is_played_by_any_chat_model(
    build_tokenizer: Build, template: str, env_name: str
) -> None:
    env_id = f"gspo_gym/{env_name}-v0"
    tokenizer = build_tokenizer(template)
    renderers = RendererCache(tokenizer)
    env = make(env_id)
    reference = ScriptedActor(type(env.unwrapped).policies["reference"])
    renderer = renderers.for_tools(env.unwrapped.tool_schemas)
    episode = run_episode(
        EpisodeRequest("g/0", Task(env_id, seed=3), sampling_seed=3),
        make_env=lambda _task: env,
        act=reference,
        renderers=renderers,
        limits=EpisodeLimits(max_turns=20, max_output_tokens=4000, max_model_len=60_000),
    )
    trajectory = asyncio.run(episode)
    assert trajectory.error is None
    assert trajectory.success
    # Mistral's template moves the tools to the last user message.
    assert len(trajectory.segments) == 1 or template == "mistral_v3"
    messages = trajectory.messages
    last = max(i for i, message in enumerate(messages) if message.role == "assistant")
    assert sum(len(message.tool_calls) for message in messages) >= 2
    tokens = trajectory.segments[-1].token_ids[: trajectory.turns[-1].action_span[1]].tolist()
    assert check_drift(renderer, tokens, messages[: last + 1]).matches
