"""How providers refuse a field of a request, as they have been seen to write it (Any: JSON)."""

from __future__ import annotations

from typing import Any


def openai_parameter(name: str, other: str) -> Any:
    """OpenAI's reasoning models about `max_tokens`."""
    text = f"Unsupported parameter: '{name}' is not supported with this model. Use '{other}' instead."
    return {"error": {"message": text, "type": "invalid_request_error", "param": name, "code": "unsupported_parameter"}}


def openai_value(name: str, value: object) -> Any:
    """OpenAI's reasoning models about a temperature."""
    only = "Only the default (1) value is supported."
    text = f"Unsupported value: '{name}' does not support {value} with this model. {only}"
    return {"error": {"message": text, "type": "invalid_request_error", "param": name, "code": "unsupported_value"}}


def gemini_unknown(*names: str) -> Any:
    """Gemini's OpenAI-compatible endpoint, which answers with a list."""
    texts = [f'Invalid JSON payload received. Unknown name "{name}": Cannot find field.' for name in names]
    violations = [{"description": text} for text in texts]
    details = [{"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": violations}]
    return [{"error": {"code": 400, "message": "\\n".join(texts), "status": "INVALID_ARGUMENT", "details": details}}]
