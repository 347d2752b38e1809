"""RendererCache: one renderer per set of tools. For whoever plays many conversations: rollouts, the gateway, audits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gspo_gym.chat.renderer import Renderer


class RendererCache:
    """One renderer per set of tools: probing a chat template is slow, and episodes of one environment share it.

    Args:
        tokenizer: a transformers tokenizer with a chat template (Any: transformers is untyped).
        template_kwargs: passed to the chat template, for example {"enable_thinking": False}.
        system_prompt: what every conversation begins with, before the environment speaks; None: nothing.
    """

    _MAX_KEPT = 64  # environments whose tools differ from task to task must not grow this without end

    def __init__(
        self, tokenizer: Any, *, template_kwargs: Mapping[str, Any] | None = None, system_prompt: str | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt
        self._template_kwargs = dict(template_kwargs or {})
        self._renderers: dict[str, Renderer] = {}

    def for_tools(self, tool_schemas: Sequence[Mapping[str, Any]]) -> Renderer:
        """The renderer of conversations in which these tools are offered.

        Raises:
            TemplateError: the chat template cannot be rendered exactly.
        """
        key = json.dumps(list(tool_schemas))  # unsorted: the order of keys reaches the prompt
        if key not in self._renderers:
            if len(self._renderers) >= self._MAX_KEPT:
                del self._renderers[next(iter(self._renderers))]
            self._renderers[key] = Renderer(
                self.tokenizer, tool_schemas=tool_schemas, template_kwargs=self._template_kwargs
            )
        return self._renderers[key]
