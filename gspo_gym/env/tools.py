"""Tools: typed Python functions that a model may call.

`@tool` marks a method of a `ToolEnv`; `Tool` is its schema for the model's chat template and the strict check of the
model's arguments; `parse_docstring` reads its description. `core.ToolEnv` runs it.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import re
import types
import typing
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, overload

import numpy as np
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic_core import PydanticSerializationError, to_jsonable_python

from gspo_gym.errors import ContractError, described, nearest_name, shortened

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MARK = "__gspo_tool__"
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # what the OpenAI API accepts
_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", types.NoneType: "null"}
_SUPPORTED = "str, int, float, bool, list, dict with str keys, Literal, Enum, pydantic models, None and unions of these"


class ToolError(Exception):
    """A failed call with a text for the model; raise it in a tool to give the model no exception's name."""


@dataclass(frozen=True, slots=True)
class _Mark:
    time_limit_seconds: float | None


@overload
def tool(function: _Function, /) -> _Function: ...


@overload
def tool(*, time_limit_seconds: float | None = None) -> Callable[[_Function], _Function]: ...


def tool(function: Any = None, /, *, time_limit_seconds: float | None = None) -> Any:
    """Mark a method of a `ToolEnv`, plain or async, as a tool; write `@tool` or `@tool(time_limit_seconds=2.0)`.

    Name, description and parameters come from the method's name, docstring (Google's "Args:" or reST's ":param x:") and
    annotations. The model is shown the returned string, or any other value as JSON.

    Args:
        time_limit_seconds: a longer call is given up and answered with an error text; None sets no limit. A limited
            plain method runs in another thread than the rest of the environment (one for all of them) and cannot be
            stopped there: it should have no effect that must not happen late.

    Raises:
        ContractError: not a function, or the limit is not positive.
    """
    if time_limit_seconds is not None and not time_limit_seconds > 0:
        raise ContractError(f"tool: expected time_limit_seconds > 0, got {time_limit_seconds}")

    def mark(marked: _Function) -> _Function:
        if not inspect.isfunction(marked):
            raise ContractError(f"tool: expected a function or method, got {type(marked).__name__}")
        setattr(marked, _MARK, _Mark(time_limit_seconds))
        return marked

    return mark if function is None else mark(function)


@dataclass(frozen=True, slots=True, eq=False)
class Tool:
    """A function as a model sees it.

    Attributes:
        parameters: JSON schema of the arguments, an object.
        function: called with the checked arguments by name.
        time_limit_seconds: limit of one call; None for no limit.
        adapters: checkers of the parameters, by name.
        required: the parameters without a default.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    function: Callable[..., Any]
    time_limit_seconds: float | None
    adapters: Mapping[str, TypeAdapter[Any]]
    required: frozenset[str]

    @classmethod
    def from_function(cls, function: Callable[..., Any]) -> Tool:
        """Return the tool of a typed function, with the time limit of `@tool`, if marked.

        Raises:
            ContractError: a parameter has no annotation or an unsupported one, or the docstring names an
                unknown one.
        """
        return _build(function, skip=0, names={})

    @property
    def schema(self) -> dict[str, Any]:
        """Return the OpenAI function schema, a fresh object."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    def check_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments as Python values (enum members for enums); only integers are converted, to floats.

        Raises:
            ToolError: an argument is unknown, missing or of the wrong type; lists everything wrong.
        """
        if not isinstance(arguments, Mapping):
            raise ToolError(f"{self.name}: expected arguments by name, got {shortened(repr(arguments))}")
        unknown = [name for name in arguments if name not in self.adapters]
        problems = [f"unknown argument {name!r}, {nearest_name(str(name), self.adapters)}" for name in unknown]
        problems += [f"missing argument {name!r}" for name in self.adapters if name in self.required - set(arguments)]
        values: dict[str, Any] = {}
        for name, adapter in self.adapters.items():
            if name in arguments:
                try:
                    values[name] = _validate(adapter, arguments[name])
                except ToolError as error:
                    problems.append(f"argument {name!r}: {error}")
        if problems:
            raise ToolError(f"{self.name}: " + "; ".join(problems))
        return values

    def bound_to(self, instance: object) -> Tool:
        return dataclasses.replace(self, function=getattr(instance, self.function.__name__))


def tools_of(cls: type) -> tuple[Tool, ...]:
    """Return the unbound tools of a class, base classes first, in the order of definition."""
    names = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
    namespace: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        namespace |= vars(base)
    members = [inspect.getattr_static(cls, name) for name in names]
    return tuple(_build(function, skip=1, names=namespace) for function in members if hasattr(function, _MARK))


def text_of(result: object, *, where: str) -> str:
    """Return a tool's result for the model: a string unchanged, anything else as JSON.

    What Python's json does not take (a dataclass, an enum, a date, a set, Decimal, Path, a numpy value, a pydantic
    model) is made plain by pydantic.

    Raises:
        ContractError: there is no such text; starts with `where`.

    >>> text_of({"left": {30, 4}, "best": np.float32(0.5)}, where="here")
    '{"left": [4, 30], "best": 0.5}'
    """
    if isinstance(result, str):
        return str.__str__(result)  # of a member of an Enum its value, which str() does not give
    try:
        try:
            return json.dumps(result, ensure_ascii=False)
        except TypeError:
            plain = to_jsonable_python(_in_order(result), inf_nan_mode="constants", fallback=_plain)
            return json.dumps(plain, ensure_ascii=False)
    except Exception as error:  # code of the author's, too: a property, a serializer
        raise ContractError(
            f"{where}: expected a result with a text for the model (a string, or something as JSON), got "
            f"{described(result)}: {error}"
        ) from error


_SEQUENCES = (list, tuple, deque)


def _in_order(value: Any) -> Any:  # a set of texts has another order in every process
    if isinstance(value, set | frozenset):
        return _sort_parts(map(_in_order, value))
    if isinstance(value, type):
        return value
    if hasattr(value, "__pydantic_serializer__"):  # which may write itself as JSON in its own way
        plain = to_jsonable_python(value, inf_nan_mode="constants", fallback=_plain)
        return _ordered_as(plain, value.__pydantic_serializer__.to_python(value, by_alias=True))
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _in_order(part) for key, part in value.items()}
    if isinstance(value, np.ndarray) and value.dtype == object:
        return _in_order(value.tolist())
    return list(map(_in_order, value)) if isinstance(value, (*_SEQUENCES, Iterator)) else value


def _ordered_as(plain: Any, value: Any) -> Any:
    """Return JSON with the lists in order that stand for sets in `value`, of which it was made in the same order."""
    if isinstance(plain, list) and isinstance(value, set | frozenset) and len(plain) == len(value):
        return _sort_parts(map(_ordered_as, plain, value))
    if isinstance(plain, list) and isinstance(value, _SEQUENCES) and len(plain) == len(value):
        return list(map(_ordered_as, plain, value))
    if isinstance(plain, dict) and isinstance(value, dict) and len(plain) == len(value):
        return dict(zip(plain, map(_ordered_as, plain.values(), value.values()), strict=True))
    return plain


def _sort_parts(parts: Iterable[Any]) -> list[Any]:
    return sorted(parts, key=lambda part: (part if isinstance(part, int) else 0, repr(part)))


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return float(value) if isinstance(value, np.longdouble) else value.item()  # of which item is one again
    if isinstance(value, np.ndarray):
        return _in_order(value.tolist())
    if isinstance(value, Iterator):
        return _in_order(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def require_distinct_names(tools: Iterable[Tool]) -> dict[str, Tool]:
    """Return the tools by name; a ContractError if two share one."""
    by_name: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in by_name:
            raise ContractError(f"two tools are named {tool.name!r}")
        by_name[tool.name] = tool
    return by_name


def _build(function: Callable[..., Any], *, skip: int, names: Mapping[str, Any]) -> Tool:
    # Without the first `skip` parameters (self); annotations may also use `names`.
    name = getattr(function, "__name__", type(function).__name__)
    where = f"tool {getattr(function, '__qualname__', name)}"
    if not _NAME.fullmatch(name):
        raise ContractError(f"{where}: expected a name of 1 to 64 ASCII letters, digits, _ and -, got {name!r}")
    docstring = parse_docstring(function.__doc__)
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    parameter_names = {parameter.name for parameter in parameters}
    for stranger in sorted(set(docstring.parameters) - parameter_names):
        raise ContractError(f"{where}: its docstring describes {stranger!r}; {nearest_name(stranger, parameter_names)}")
    types_by_name = _annotations(function, parameters, names, where)
    properties = {
        parameter.name: _property(parameter, types_by_name[parameter.name], docstring.parameters, where)
        for parameter in parameters
    }
    required_names = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    mark: _Mark | None = getattr(function, _MARK, None)
    return Tool(
        name=name,
        description=docstring.description,
        parameters={"type": "object", "properties": properties, "required": required_names},
        function=function,
        time_limit_seconds=mark.time_limit_seconds if mark else None,
        adapters={key: TypeAdapter(value) for key, value in types_by_name.items()},
        required=frozenset(required_names),
    )


def _annotations(
    function: Callable[..., Any], parameters: Iterable[inspect.Parameter], names: Mapping[str, Any], where: str
) -> dict[str, Any]:  # the return type is ignored, and may be unresolvable
    hints: dict[str, Any] = {}
    for parameter in parameters:
        place = f"{where}, parameter {parameter.name!r}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ContractError(
                f"{place}: expected a parameter that can be given by name, got a {parameter.kind.description} one"
            )
        if parameter.annotation is parameter.empty:
            raise ContractError(f"{place}: expected a type annotation, got none; supported are {_SUPPORTED}")
        hints[parameter.name] = _resolve_annotation(parameter.annotation, function, names, place)
    return hints


def _resolve_annotation(annotation: Any, function: Callable[..., Any], names: Mapping[str, Any], place: str) -> Any:
    # The function's module comes before the class body, where a tool may be called `list`.
    holder = types.SimpleNamespace(__annotations__={"annotation": annotation})
    module = getattr(inspect.unwrap(function), "__globals__", {})
    try:
        try:
            return typing.get_type_hints(holder, module, include_extras=True)["annotation"]
        except NameError:
            return typing.get_type_hints(holder, module, dict(names), include_extras=True)["annotation"]
    except (NameError, SyntaxError, TypeError, AttributeError) as error:
        raise ContractError(f"{place}: cannot resolve the annotation {annotation!r}: {error}") from error


def _property(parameter: inspect.Parameter, hint: Any, descriptions: Mapping[str, str], where: str) -> dict[str, Any]:
    place = f"{where}, parameter {parameter.name!r}"
    schema = _schema(hint, place)
    if description := descriptions.get(parameter.name):
        schema["description"] = description
    # A default of None is left out: the parameter is not required, which says enough.
    if parameter.default is not parameter.empty and parameter.default is not None:
        schema["default"] = _default(parameter.default, hint, place)
    return schema


def _default(value: Any, hint: Any, place: str) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    try:
        json.dumps(value)
        return value  # as written; pydantic would turn the 10 of a float into 10.0
    except (TypeError, ValueError):
        pass
    try:
        return TypeAdapter(hint).dump_python(value, mode="json", by_alias=True, warnings=False)
    except PydanticSerializationError as error:
        raise ContractError(f"{place}: expected a default that JSON can hold, got {described(value)}") from error


def _schema(hint: Any, where: str) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    if hint is None:
        return {"type": "null"}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _choice([member.value for member in hint], where)
    if origin is Literal:
        return _choice([a.value if isinstance(a, enum.Enum) else a for a in arguments], where)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(argument, where) for argument in arguments]}
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return _model_schema(hint, where)
    if hint is list or origin is list:
        return {"type": "array", **({"items": _schema(arguments[0], where)} if arguments else {})}
    if hint is dict or (origin is dict and arguments[0] is str):
        return {"type": "object", **({"additionalProperties": _schema(arguments[1], where)} if arguments else {})}
    raise ContractError(f"{where}: expected one of {_SUPPORTED}, got {inspect.formatannotation(hint)}")


def _model_schema(model: type[BaseModel], where: str) -> dict[str, Any]:
    # Without references and titles, which would only cost tokens.
    try:
        schema = model.model_json_schema()
    except PydanticInvalidForJsonSchema as error:
        raise ContractError(f"{where}: {model.__name__} has no JSON schema: {error}") from error
    definitions = schema.pop("$defs", {})

    def inlined(part: Any, inside: tuple[str, ...] = ()) -> Any:
        if isinstance(part, list):
            return [inlined(element, inside) for element in part]
        if not isinstance(part, dict):
            return part
        name = str(part.get("$ref", "")).rpartition("/")[2]
        if name and name in inside:
            raise ContractError(f"{where}: expected a model that does not contain itself, got {model.__name__}")
        if name:
            return {**inlined(definitions[name], (*inside, name)), **{k: v for k, v in part.items() if k != "$ref"}}
        without_titles = {key: value for key, value in part.items() if key != "title" or not isinstance(value, str)}
        if "properties" in without_titles:  # its keys are field names, and one may be "title"
            without_titles["properties"] = {key: inlined(value, inside) for key, value in part["properties"].items()}
        return {key: value if key == "properties" else inlined(value, inside) for key, value in without_titles.items()}

    flat: dict[str, Any] = inlined(schema)
    return flat


def _choice(values: list[Any], where: str) -> dict[str, Any]:
    strangers = [value for value in values if type(value) not in _JSON_TYPES]
    if strangers or not values:
        raise ContractError(f"{where}: expected choices that are JSON values, got {strangers or 'none'}")
    kinds = {_JSON_TYPES[type(value)] for value in values}
    return {"enum": values} | ({"type": kinds.pop()} if len(kinds) == 1 else {})


def _validate(adapter: TypeAdapter[Any], value: Any) -> Any:
    # Checked as JSON, where an enum is given by its value.
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise ToolError(f"expected a JSON value, got {shortened(repr(value))}") from None
    try:
        parsed_value = adapter.validate_json(text, strict=True)
    except ValidationError as error:
        fields = _fields(adapter.json_schema())
        wrong = [_explain(detail, fields) for detail in error.errors(include_url=False, include_context=False)]
        raise ToolError(" or ".join(dict.fromkeys(wrong)) + f", got {shortened(repr(value))}") from None
    dumped_value = adapter.dump_python(parsed_value, mode="json", exclude_unset=True, by_alias=True)
    if not _agree(dumped_value, value):  # pydantic accepts true for Literal[1]
        raise ToolError(f"expected no boolean for a number and no number for a boolean, got {shortened(repr(value))}")
    return parsed_value


def _agree(a: object, b: object) -> bool:  # of equal JSON values, also on which are booleans
    if isinstance(a, list) and isinstance(b, list):
        return all(map(_agree, a, b))
    if isinstance(a, dict) and isinstance(b, Mapping):
        return all(_agree(a[key], b[key]) for key in a if key in b)  # a model may use a field's alias
    return isinstance(a, bool) == isinstance(b, bool)


def _fields(schema: Any) -> set[str]:  # of all models in a schema
    if isinstance(schema, list):
        return set().union(*map(_fields, schema))
    if not isinstance(schema, dict):
        return set()
    return set(schema.get("properties", ())).union(*map(_fields, schema.values()))


def _explain(detail: Any, fields: Collection[str]) -> str:
    message = str(detail["msg"]).replace("Input should be", "expected", 1)
    # A location also names the alternatives of a union, which would tell the model nothing.
    path = "".join(f"[{part!r}]" for part in detail["loc"] if isinstance(part, int) or part in fields)
    return f"at {path}: {message}" if path else message


_ARGS = re.compile(r"(Args|Arguments|Parameters):\s*$")
_SECTION = re.compile(
    r"(Args|Arguments|Parameters|Returns|Yields|Raises|Examples?|Notes?|Attributes|Warnings?|References|See Also):\s*$"
)
_GOOGLE_ENTRY = re.compile(r"\*{0,2}(\w+(?:\s*,\s*\w+)*)\s*(?:\([^)]*\))?:\s*(.*)$")
_REST_FIELD = re.compile(r":(\w+)\s*([^:]*):\s*(.*)$")


@dataclass(frozen=True, slots=True)
class Docstring:
    """`description` is the text before the first section; `parameters` maps names to descriptions."""

    description: str
    parameters: dict[str, str]


def parse_docstring(text: str | None) -> Docstring:
    '''Return the description and the parameters of a docstring; lines of a paragraph are joined.

    >>> parse_docstring("""Add two numbers.
    ...
    ...     Args:
    ...         a (int): the first,
    ...             which may be negative
    ...         b: the second
    ... """)
    Docstring(description='Add two numbers.', parameters={'a': 'the first, which may be negative', 'b': 'the second'})
    >>> parse_docstring("Add.\\n\\n:param int a: the first\\n:returns: the sum")
    Docstring(description='Add.', parameters={'a': 'the first'})
    '''
    lines = inspect.cleandoc(text or "").splitlines()
    starts = [index for index, line in enumerate(lines) if _SECTION.match(line) or _REST_FIELD.match(line)]
    stops = [*starts, len(lines)]
    parameters: dict[str, str] = {}
    for start, stop in zip(starts, stops[1:], strict=True):
        if _ARGS.match(lines[start]):
            parameters |= _google_entries(lines[start + 1 : stop])
        elif (field := _REST_FIELD.match(lines[start])) and field[1] == "param" and field[2].strip():
            parameters[field[2].split()[-1]] = _join_lines([field[3], *lines[start + 1 : stop]])
    return Docstring(_paragraphs(lines[: stops[0]]), parameters)


def _google_entries(lines: list[str]) -> dict[str, str]:
    # Entries share one indentation; their further lines are deeper.
    margin = next((_indentation(line) for line in lines if line.strip()), 0)
    texts: dict[str, list[str]] = {}
    current: list[str] = []
    for line in lines:
        if not line.strip():
            continue
        if margin == 0 or _indentation(line) < margin:
            break
        entry = _GOOGLE_ENTRY.match(line.strip()) if _indentation(line) == margin else None
        if entry is None:
            current.append(line)
            continue
        current = [entry[2]]
        texts |= dict.fromkeys(re.split(r"\s*,\s*", entry[1]), current)
    return {name: _join_lines(text) for name, text in texts.items()}


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def _join_lines(lines: list[str]) -> str:
    return " ".join(line.strip() for line in lines if line.strip())


def _paragraphs(lines: list[str]) -> str:
    blocks = re.split(r"\n\s*\n", "\n".join(lines).strip())
    return "\n".join(_join_lines(block.splitlines()) for block in blocks)
