"""Build what gives the teacher "self" its feedback, and refuse templates that cannot show it."""

from __future__ import annotations

from gspo_gym.chat.renderer import Renderer
from gspo_gym.config.build.apps import environment_ids
from gspo_gym.config.build.rollouts import Player, build_environment, looking_at_source, tools_of
from gspo_gym.config.run_config import RunConfig
from gspo_gym.env.checks.answers import AnswerCheck
from gspo_gym.errors import ConfigError, TemplateError
from gspo_gym.rollout.feedback import with_feedback
from gspo_gym.run.feedback import Feedback, FeedbackEnvironment
from gspo_gym.run.judging import Judging
from gspo_gym.types import Message, ToolCall


async def build_feedback(config: RunConfig, player: Player, judging: Judging | None) -> Feedback | None:
    """Return the source of [distillation]'s feedback; None: no teacher reads any.

    A judge keeps its reasons from now on, if it is the source.

    Raises:
        ConfigError: the chat template cannot show feedback, or the source is not there.
        GymError: an environment cannot be made.
    """
    settings = config.distillation
    if settings is None or settings.feedback == "none":
        return None
    environments = {}
    for name, source in zip(environment_ids(config), config.sources, strict=True):
        async with looking_at_source(config, source) as env:
            renderer = player.renderers.for_tools(tools := tools_of(env))
        require_shown(renderer, name, tool=tools[0]["function"]["name"] if tools else None)
        check = AnswerCheck(
            build_environment(config, source),
            env_id=name,
            max_turns=config.rollout.max_turns,
            step_timeout_seconds=config.limits.step_timeout_seconds,
        )
        environments[name] = FeedbackEnvironment(renderer, check)
    window = config.rollout.max_model_len
    if settings.feedback != "judge":
        return Feedback(settings.feedback, environments=environments, max_model_len=window)
    if judging is None:  # which a rule refuses, with the key
        raise ConfigError('distillation.feedback: "judge" needs the judge of [judge]; set judge.enabled = true')
    judging.keep_reasons()
    return Feedback("judge", environments=environments, max_model_len=window, judges_reasons=judging.reasons_about)


def require_shown(renderer: Renderer, env_id: str, *, tool: str | None) -> None:
    """Refuse a chat template that cannot show feedback after an observation, or after the result of the tool.

    Raises:
        ConfigError: names the environment, what the template refuses, and what to do.
    """
    task, answer = Message("user", "Begin."), Message("assistant", "Seven.")
    conversations = [(task,), (task, answer, Message("user", "No."))]
    if tool is not None:
        call = Message("assistant", "", (ToolCall("call_0", tool, {"key": "value"}),))
        conversations.append((task, call, Message("tool", "No.", tool_call_id="call_0", name=tool)))
    for conversation in conversations:
        try:
            renderer.start(with_feedback(conversation, "Too high."))
        except TemplateError as error:
            raise ConfigError(
                f"distillation.feedback: the chat template of model.base cannot show feedback after a "
                f"{conversation[-1].role}'s message in {env_id}: {error}. Give another template (model.chat_template), "
                "or remove [distillation]"
            ) from error
