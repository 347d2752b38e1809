"""Tool: the schema of a typed function, and strict checking of arguments.

Pinned here:

1.  The schema of every supported type, by hand, with descriptions and defaults.
2.  What cannot become a tool is refused where the class is defined, naming the parameter.
3.  Arguments are checked, never coerced but from integer to float; every complaint names the argument and what came.
4.  Tools are found over base classes, in the order of their definition.
"""

from __future__ import annotations

import datetime
import decimal
import enum
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, TypedDict

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict, Field, field_serializer
from pydantic.dataclasses import dataclass as pydantic_dataclass

from gspo_gym.env.core import ToolEnv, count_calls
from gspo_gym.env.tools import Tool, ToolError, require_distinct_names, text_of, tool, tools_of
from gspo_gym.errors import ContractError
from gspo_gym.types import Message, ToolCall


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.Enum):
    LOW = 1
    HIGH = 2


def search(
    query: str,
    limit: int = 10,
    *,
    score: float | None = None,
    exact: bool = False,
    tags: list[str] = [],  # noqa: B006 - the default is what is under test
    extra: dict[str, int] | None = None,
    mode: Literal["all", "any"] = "all",
    color: Color = Color.BLUE,
) -> str:
    """Search the shop.

    Args:
        query: What to look for,
            in words.
        limit: At most so many.
    """
    return query


def test_the_schema_is_the_openai_one() -> None:
    assert Tool.from_function(search).schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the shop.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to look for, in words."},
                    "limit": {"type": "integer", "description": "At most so many.", "default": 10},
                    "score": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                    "exact": {"type": "boolean", "default": False},
                    "tags": {"type": "array", "items": {"type": "string"}, "default": []},
                    "extra": {
                        "anyOf": [{"type": "object", "additionalProperties": {"type": "integer"}}, {"type": "null"}]
                    },
                    "mode": {"enum": ["all", "any"], "type": "string", "default": "all"},
                    "color": {"enum": ["red", "blue"], "type": "string", "default": "blue"},
                },
                "required": ["query"],
            },
        },
    }


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (list, {"type": "array"}),
        (dict, {"type": "object"}),
        (list[list[int]], {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}),
        (Optional[int], {"anyOf": [{"type": "integer"}, {"type": "null"}]}),  # noqa: UP045 - both spellings
        (int | str, {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
        (Literal[1, "a"], {"enum": [1, "a"]}),
        (Literal[Color.RED], {"enum": ["red"], "type": "string"}),
        (Level, {"enum": [1, 2], "type": "integer"}),
    ],
    ids=str,
)
def test_the_schema_of_a_type(hint: Any, schema: dict[str, Any]) -> None:
    def function(x) -> None: ...  # type: ignore[no-untyped-def]

    function.__annotations__["x"] = hint
    assert Tool.from_function(function).parameters["properties"]["x"] == schema


class Point(TypedDict):
    x: int


@pytest.mark.parametrize(
    "hint", [bytes, set[int], tuple[int, int], dict[int, str], Point, Any, list[bytes], Annotated[int, "few"]], ids=str
)
def test_an_unsupported_type_names_the_parameter(hint: Any) -> None:
    def function(x) -> None: ...  # type: ignore[no-untyped-def]

    function.__annotations__["x"] = hint
    with pytest.raises(ContractError, match=r"function, parameter 'x': expected one of str, int, float"):
        Tool.from_function(function)


def test_a_parameter_without_annotation_is_refused_where_the_class_is_defined() -> None:
    with pytest.raises(ContractError, match=r"tool .*Bad\.look, parameter 'x': expected a type annotation, got none"):

        class Bad(ToolEnv):
            @tool
            def look(self, x) -> str:  # type: ignore[no-untyped-def]
                return "nothing"


def test_an_annotation_that_does_not_exist_is_refused() -> None:
    def function(x: NoSuchType) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(ContractError, match=r"parameter 'x': cannot resolve the annotation 'NoSuchType'"):
        Tool.from_function(function)


def test_parameters_that_have_no_name_are_refused() -> None:
    def any_number(*values: int) -> None: ...
    def any_names(**values: int) -> None: ...
    def nameless(value: int, /) -> None: ...

    for function, kind in [
        (any_number, "variadic positional"),
        (any_names, "variadic keyword"),
        (nameless, "positional-only"),
    ]:
        with pytest.raises(ContractError, match=rf"expected a parameter that can be given by name, got a {kind} one"):
            Tool.from_function(function)


def test_a_docstring_that_describes_an_unknown_parameter_is_refused() -> None:
    def look(place: str) -> None:
        """Look.

        Args:
            plaace: where
        """

    with pytest.raises(ContractError, match=r"describes 'plaace'; did you mean 'place'\?"):
        Tool.from_function(look)


def test_a_name_that_the_wire_cannot_carry_is_refused() -> None:
    def häuser() -> None: ...

    with pytest.raises(ContractError, match="1 to 64 ASCII letters"):
        Tool.from_function(häuser)


def test_choices_must_be_json_values() -> None:
    class Odd(enum.Enum):
        A = (1, 2)

    def function(x) -> None: ...  # type: ignore[no-untyped-def]

    function.__annotations__["x"] = Odd
    with pytest.raises(ContractError, match=r"parameter 'x': expected choices that are JSON values, got \[\(1, 2\)\]"):
        Tool.from_function(function)


def test_a_tool_named_like_a_type_does_not_hide_the_type() -> None:
    class Shelf(ToolEnv):
        @tool
        def list(self, kinds: list[str]) -> str:  # type: ignore[valid-type]
            return ""

        class Size(enum.Enum):
            S = "s"

        @tool
        def pick(self, size: Size) -> str:
            return ""

    items, size = (each.parameters["properties"] for each in tools_of(Shelf))
    assert items == {"kinds": {"type": "array", "items": {"type": "string"}}}
    assert size == {"size": {"enum": ["s"], "type": "string"}}


def test_good_arguments_become_python_values() -> None:
    checked = Tool.from_function(search).check_arguments(
        {"query": "tea", "limit": 3, "score": 1, "tags": ["a"], "extra": {"n": 2}, "color": "red", "exact": True}
    )
    expected = {"query": "tea", "limit": 3, "score": 1.0, "tags": ["a"], "extra": {"n": 2}, "color": Color.RED}
    assert checked == {**expected, "exact": True}
    assert type(checked["score"]) is float


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"limit": "5"}, "argument 'limit': expected a valid integer, got '5'"),
        ({"limit": True}, "argument 'limit': expected a valid integer, got True"),
        ({"limit": 2.0}, "argument 'limit': expected a valid integer, got 2.0"),
        ({"limit": None}, "argument 'limit': expected a valid integer, got None"),
        ({"query": 7}, "argument 'query': expected a valid string, got 7"),
        ({"exact": 1}, "argument 'exact': expected a valid boolean, got 1"),
        ({"exact": "true"}, "argument 'exact': expected a valid boolean, got 'true'"),
        ({"score": "1"}, "argument 'score': expected a valid number, got '1'"),
        ({"score": float("nan")}, "argument 'score': expected a JSON value, got nan"),
        ({"tags": "a"}, "argument 'tags': expected a valid array, got 'a'"),
        ({"tags": ["a", 1]}, "argument 'tags': at [1]: expected a valid string, got ['a', 1]"),
        ({"extra": {"n": "x"}}, "argument 'extra': expected a valid integer, got {'n': 'x'}"),
        ({"mode": "some"}, "argument 'mode': expected 'all' or 'any', got 'some'"),
        ({"color": "RED"}, "argument 'color': expected 'red' or 'blue', got 'RED'"),
        ({"limt": 1}, "unknown argument 'limt', did you mean 'limit'?"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_named_and_shown(wrong: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ToolError) as caught:
        Tool.from_function(search).check_arguments({"query": "tea", **wrong})
    assert str(caught.value) == f"search: {complaint}"


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ToolError) as caught:
        Tool.from_function(search).check_arguments({"limit": "5", "colour": "red"})
    assert str(caught.value) == (
        "search: unknown argument 'colour', did you mean 'color'?; missing argument 'query'; "
        "argument 'limit': expected a valid integer, got '5'"
    )


def test_a_union_says_all_that_it_would_take() -> None:
    def function(x: int | str) -> None: ...

    with pytest.raises(ToolError, match=r"expected a valid integer or expected a valid string, got \[\]"):
        Tool.from_function(function).check_arguments({"x": []})


def test_integers_and_booleans_of_a_literal_are_told_apart() -> None:
    def function(x: Literal[1, 2]) -> None: ...

    assert Tool.from_function(function).check_arguments({"x": 1}) == {"x": 1}
    with pytest.raises(ToolError):
        Tool.from_function(function).check_arguments({"x": True})


def test_a_long_wrong_value_is_cut() -> None:
    with pytest.raises(ToolError) as caught:
        Tool.from_function(search).check_arguments({"query": "tea", "limit": "x" * 10_000})
    assert str(caught.value).endswith("x...")
    assert len(str(caught.value)) < 150


def test_arguments_that_are_no_mapping_are_an_error_for_the_model() -> None:
    with pytest.raises(ToolError, match=r"search: expected arguments by name, got \['tea'\]"):
        Tool.from_function(search).check_arguments(["tea"])  # type: ignore[arg-type]


def test_tools_of_base_classes_come_first_and_may_be_replaced_or_dropped() -> None:
    class Base(ToolEnv):
        @tool
        def first(self) -> str:
            """Of the base."""
            return ""

        @tool
        def second(self) -> str:
            return ""

        @tool
        def third(self) -> str:
            return ""

    class Child(Base):
        @tool
        def fourth(self) -> str:
            return ""

        @tool
        def first(self) -> str:
            """Of the child."""
            return ""

        def second(self) -> str:  # no longer a tool
            return ""

    found = tools_of(Child)
    assert [each.name for each in found] == ["first", "third", "fourth"]
    assert found[0].description == "Of the child."


def test_two_tools_of_one_name_are_refused() -> None:
    one = Tool.from_function(search)
    with pytest.raises(ContractError, match="two tools are named 'search'"):
        require_distinct_names([one, one])


@pytest.mark.parametrize("limit", [0, -1.0, float("nan")])
def test_a_time_limit_must_be_positive(limit: float) -> None:
    with pytest.raises(ContractError, match="expected time_limit_seconds > 0"):
        tool(time_limit_seconds=limit)


def test_only_functions_can_be_marked() -> None:
    with pytest.raises(ContractError, match="expected a function or method, got staticmethod"):

        class Bad(ToolEnv):
            @tool
            @staticmethod
            def look() -> str:
                return ""


@dataclass
class Place:
    number: int
    doors: set[str]


class Amount(BaseModel):
    items: int


class Word(enum.StrEnum):
    HERE = "here"


class Old(str, enum.Enum):  # noqa: UP042 - str() of which gives its name
    HERE = "here"


DOORS = frozenset({"north", "east", "south", "west"})
IN_ORDER = '{"doors": ["east", "north", "south", "west"]}'


class Doors(BaseModel):
    doors: frozenset[str]


@pydantic_dataclass
class SealedDoors:
    doors: frozenset[str]


class Timed(BaseModel):
    seconds: datetime.timedelta
    doors: frozenset[str]

    @field_serializer("seconds")
    def _as_number(self, value: datetime.timedelta) -> float:
        return value.total_seconds()


class Dated(BaseModel):
    model_config = ConfigDict(ser_json_bytes="base64")
    at: datetime.date
    raw: bytes
    doors: frozenset[str]

    @field_serializer("at", when_used="json")
    def _year(self, value: datetime.date) -> int:
        return value.year


DATED = '{"at": 2020, "raw": "_w==", "doors": ["east", "north", "south", "west"]}'


@dataclass
class Unfinished:
    left: int = field(init=False)


def circle() -> list[Any]:
    ends_in_itself: list[Any] = []
    ends_in_itself.append(ends_in_itself)
    return ends_in_itself


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("as it is", "as it is"),
        ("", ""),
        ({"a": [1, None]}, '{"a": [1, null]}'),
        (None, "null"),
        ("é", "é"),
        (["é"], '["é"]'),
        ({1: True, "b": (1, 2)}, '{"1": true, "b": [1, 2]}'),
        (float("nan"), "NaN"),
        (np.int64(3), "3"),
        (np.float32(0.5), "0.5"),
        (np.longdouble(0.5), "0.5"),
        (np.bool_(True), "true"),
        ([np.arange(3), {np.int64(1): np.float64(2)}], '[[0, 1, 2], {"1": 2.0}]'),
        (Place(1, {"north", "east", "south", "west"}), '{"number": 1, "doors": ["east", "north", "south", "west"]}'),
        ([Amount(items=1)], '[{"items": 1}]'),
        (Doors(doors=DOORS), IN_ORDER),
        ([SealedDoors(doors=DOORS)], f"[{IN_ORDER}]"),
        (deque([DOORS]), '[["east", "north", "south", "west"]]'),
        ((side for side in [DOORS]), '[["east", "north", "south", "west"]]'),
        (map(set, [DOORS]), '[["east", "north", "south", "west"]]'),
        ({"at": iter([DOORS])}, '{"at": [["east", "north", "south", "west"]]}'),
        (np.array([DOORS, 1], dtype=object), '[["east", "north", "south", "west"], 1]'),
        (Dated(at=datetime.date(2020, 5, 6), raw=b"\xff", doors=DOORS), DATED),
        (Timed(seconds=datetime.timedelta(seconds=90), doors=frozenset()), '{"seconds": 90.0, "doors": []}'),
        (Color.RED, '"red"'),
        (Word.HERE, "here"),
        (Old.HERE, "here"),
        ({"at": datetime.date(2026, 1, 2)}, '{"at": "2026-01-02"}'),
        ({30, 4, 5}, "[4, 5, 30]"),
        (decimal.Decimal("1.5"), '"1.5"'),
        (Path("/x"), '"/x"'),
    ],
)
def test_a_result_is_text_or_json(result: Any, text: str) -> None:
    assert text_of(result, where="here") == text
    assert type(text_of(result, where="here")) is str


@pytest.mark.parametrize(
    "result",
    [object(), ValueError("x"), [len], circle(), {"a": {"b": b"\xff"}}, Unfinished()],
    ids=["object", "error", "function", "circle", "bytes", "unset field"],
)
def test_a_result_that_is_neither_is_the_authors_error(result: Any) -> None:
    with pytest.raises(ContractError, match=r"^here: expected a result with a text for the model .*, got "):
        text_of(result, where="here")


# -- models as arguments ---------------------------------------------------------------------------------------------


class Line(BaseModel):
    title: str = Field(description="What is bought.")
    count: int = Field(default=1, ge=1)
    gift: bool = False


class Order(BaseModel):
    lines: list[Line]
    colour: Color | None = None
    city: str = Field(alias="town")


def place(order: Order, notes: list[Line] = []) -> str:  # noqa: B006
    """Order."""
    return f"{order.lines[0].count} to {order.city}"


def test_a_model_is_an_object_of_its_fields_without_references_and_titles() -> None:
    line = {
        "type": "object",
        "properties": {
            "title": {"type": "string", "description": "What is bought."},
            "count": {"type": "integer", "minimum": 1, "default": 1},
            "gift": {"type": "boolean", "default": False},
        },
        "required": ["title"],
    }
    colour = {"anyOf": [{"enum": ["red", "blue"], "type": "string"}, {"type": "null"}], "default": None}
    parameters = Tool.from_function(place).parameters
    assert parameters["properties"]["order"] == {
        "type": "object",
        "properties": {"lines": {"type": "array", "items": line}, "colour": colour, "town": {"type": "string"}},
        "required": ["lines", "town"],
    }
    assert parameters["properties"]["notes"]["items"] == line
    assert parameters["required"] == ["order"]


def test_a_default_that_is_a_model_or_holds_enums_is_json_in_the_schema() -> None:
    def order(
        first: Order = Order(lines=[], town="Rome"),  # noqa: B008 - the default is what is under test
        colors: list[Color] = [Color.BLUE],  # noqa: B006
    ) -> str:
        return ""

    properties = Tool.from_function(order).parameters["properties"]
    assert properties["first"]["default"] == {"lines": [], "colour": None, "town": "Rome"}
    assert properties["colors"]["default"] == ["blue"]


def test_a_default_that_json_cannot_hold_is_refused() -> None:
    def order(count: int = object()) -> str:  # type: ignore[assignment]
        return ""

    with pytest.raises(ContractError, match="'count': expected a default that JSON can hold, got object <object"):
        Tool.from_function(order)


def test_a_model_s_arguments_arrive_as_the_model() -> None:
    checked = Tool.from_function(place).check_arguments({"order": {"lines": [{"title": "ball"}], "town": "Rome"}})
    assert checked == {"order": Order(lines=[Line(title="ball")], town="Rome")}


@pytest.mark.parametrize(
    ("order", "complaint"),
    [
        ({"lines": [{"title": "b", "count": 0}], "town": "Rome"}, r"at \['lines'\]\[0\]\['count'\]: expected greater"),
        ({"lines": [{"title": "ball", "count": "2"}], "town": "Rome"}, r".*\['count'\]: expected a valid integer"),
        ({"lines": [{"title": "ball", "gift": 1}], "town": "Rome"}, r".*\['gift'\]: expected a valid boolean"),
        ({"lines": []}, r"at \['town'\]: Field required"),
        ("Rome", "expected an object"),
    ],
)
def test_what_is_wrong_in_a_model_is_told_with_its_place(order: Any, complaint: str) -> None:
    with pytest.raises(ToolError, match=f"place: argument 'order': {complaint}"):
        Tool.from_function(place).check_arguments({"order": order})


class Tree(BaseModel):
    children: list[Tree] = []


class Opaque(BaseModel):
    model_config = {"arbitrary_types_allowed": True}
    thing: Color
    made_by: ToolEnv


@pytest.mark.parametrize(("model", "text"), [(Tree, "does not contain itself"), (Opaque, "Opaque has no JSON schema")])
def test_a_model_that_no_schema_can_say_is_refused(model: type[BaseModel], text: str) -> None:
    def grow(given: Any) -> None: ...

    grow.__annotations__["given"] = model
    with pytest.raises(ContractError, match=rf"grow, parameter 'given': .*{text}"):
        Tool.from_function(grow)


def test_calls_are_counted_by_tool_and_those_of_unknown_tools_are_not() -> None:
    class Shop(ToolEnv):
        def start(self, options: Any) -> str:
            return "Buy."

        @tool
        def buy(self, count: int) -> str:
            """Buy."""
            return str(10 // count)

        @tool
        def look(self) -> str:
            """Look."""
            return "a shelf"

    env = Shop()
    env.reset(seed=0)
    conversation = []
    # One division by zero, one wrong argument, one that works; one unknown tool; and a look.
    asked_for = [("buy", {"count": 0}), ("buy", {"count": "x"}), ("buy", {"count": 5}), ("sell", {}), ("look", {})]
    for name, given in asked_for:
        asked = Message("assistant", "", (ToolCall("call_0", name, given),))
        conversation += [asked, *env.step(asked)[0]]
    counts = count_calls(conversation)
    assert counts.made == {"buy": 3, "look": 1}
    assert counts.failed == {"buy": 2, "look": 0}
