"""How conversations are put to the model, from a configuration: its chat template, and the date that this shows."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from gspo_gym.base.files import replace_file
from gspo_gym.chat.renderer import RendererCache
from gspo_gym.chat.source import NOW, require_syntax
from gspo_gym.config.run_config import RunConfig, load_config
from gspo_gym.errors import ConfigError, TemplateError

TEMPLATE_FILE = "chat_template.jinja"  # in a run's folder and in checkpoints, as transformers names it


def read_template(config: RunConfig) -> str | None:
    """Return the text of model.chat_template; None if it is absent.

    Raises:
        ConfigError: the file cannot be read, or is no Jinja template.
    """
    if config.model.chat_template is None:
        return None
    path = Path(config.model.chat_template).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
        require_syntax(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.chat_template: {path} cannot be read: {error}") from error
    except TemplateError as error:
        raise ConfigError(f"model.chat_template: {path} is no Jinja template: {error}") from error
    return text


def use_template(config: RunConfig, tokenizer: Any) -> None:
    """Give a tokenizer (Any: untyped) the template of model.chat_template, which is saved with it from then on.

    Raises:
        ConfigError: see `read_template`.
    """
    if (text := read_template(config)) is not None:
        tokenizer.chat_template = text


def with_fixed_date(config: RunConfig, tokenizer: Any, *, today: datetime.date | None = None) -> RunConfig:
    """Return the configuration with a template_date, if the template shows one: today's, unless it has one.

    `today` None: the machine's.
    """
    template = read_template(config) or tokenizer.chat_template
    # Several templates by name, of which the tools decide.
    texts = template.values() if isinstance(template, dict) else [template or ""]
    if config.model.template_date is not None or not any(NOW in text for text in texts):
        return config
    return _with_date(config, (today or datetime.date.today()).isoformat())


def with_recorded_date(config: RunConfig) -> RunConfig:
    """Return the configuration with the template_date of the run in its folder, unless it has one."""
    date = load_config(config.run_folder / "config.toml").model.template_date
    return config if config.model.template_date is not None or date is None else _with_date(config, date)


def record_template(config: RunConfig) -> None:
    """Copy the file of model.chat_template into the run's folder, if there is one."""
    if (text := read_template(config)) is not None:
        replace_file(config.run_folder / TEMPLATE_FILE, text)


def require_same_template(config: RunConfig) -> None:
    """Refuse to go on with a run if the file of model.chat_template says something else than when it began.

    Raises:
        ConfigError: names both files.
    """
    template_file = config.run_folder / TEMPLATE_FILE
    if template_file.is_file() and read_template(config) != template_file.read_text(encoding="utf-8"):
        raise ConfigError(
            f"model.chat_template: {config.model.chat_template} is another template than {template_file}, with which "
            "the run began; a resumed run must go on as it began. Start another run instead"
        )


def build_renderers(config: RunConfig, tokenizer: Any) -> RendererCache:
    """Return the renderers of messages, with [rollout.policy_config]'s template arguments (Any: transformers)."""
    policy_config = config.rollout.policy_config
    return RendererCache(
        tokenizer,
        template_kwargs=None if policy_config is None else policy_config.chat_template_kwargs,
        system_prompt=None if policy_config is None else policy_config.system_prompt,
        tools_in=config.rollout.tools_in,
        date=template_date(config),
    )


def template_date(config: RunConfig) -> datetime.date:
    """Return the date that templates show: the configuration's, or today's, which does not change at midnight."""
    date = config.model.template_date
    return datetime.date.today() if date is None else datetime.date.fromisoformat(date)


def _with_date(config: RunConfig, date: str) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"template_date": date})})
