"""Messages and answers: attributes, and `get` as in a mapping."""

from types import SimpleNamespace


class _Record(SimpleNamespace):
    def get(self, name, default=None):
        return getattr(self, name, default)


class UserMessage(_Record):
    role = "user"


class SystemMessage(_Record):
    role = "system"


class ToolMessage(_Record):
    role = "tool"


class AssistantMessage(_Record):
    role = "assistant"


class ResponseMessage(_Record):
    role = "assistant"


class ToolCall(_Record):
    pass


class Tool(_Record):
    pass


class Response(_Record):
    pass


class ResponseTokens(_Record):
    pass


class Usage(_Record):
    pass
