"""Functions for a model: what it is told of them, and what of it reaches them."""

from __future__ import annotations

import enum
from typing import Any, Literal

import pytest

from breeze_rtc.agent.tools import BadTool, Tool, Tools
from breeze_rtc.errors import BadRequest


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


def order(
    session: object,
    dish: Literal["pizza", "soup"],
    size: Size,
    *,
    count: int = 1,
    price: float | None = None,
    extras: list[str] | None = None,
) -> Any:
    """Order something to eat,
    for one.

    dish: what is on the menu
    count: how many
    """
    return {"dish": dish, "size": size.name, "count": count, "price": price, "extras": extras, "session": session}


def test_the_schema_is_read_off_the_function() -> None:
    """Types, defaults and the docstring's lines; the session is nobody's business."""
    tool = Tool(order)
    assert (tool.name, tool.description) == ("order", "Order something to eat, for one.")
    assert tool.parameters == {
        "type": "object",
        "required": ["dish", "size"],
        "properties": {
            "dish": {"type": "string", "enum": ["pizza", "soup"], "description": "what is on the menu"},
            "size": {"type": "string", "enum": ["small", "large"]},
            "count": {"type": "integer", "description": "how many"},
            "price": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "extras": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
        },
    }


async def test_arguments_become_python_values() -> None:
    """Enums are members, whole floats ints, and the session is filled in."""
    tools = Tools({"order": Tool(order)}, "me")
    said = await tools.call("order", '{"dish": "soup", "size": "large", "count": 2.0, "price": 3, "extras": ["salt"]}')
    assert said == ('{"dish": "soup", "size": "LARGE", "count": 2, "price": 3.0, "extras": ["salt"], "session": "me"}')


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"dish": "soup"}', "'size' is missing"),
        ('{"dish": "cake", "size": "small"}', "'cake' is no value"),
        ('{"dish": "soup", "size": "small", "count": "two"}', "'two' is no value"),
        ('{"dish": "soup", "size": "small", "count": true}', "True is no value"),
        ('{"dish": "soup", "size": "small", "extras": [1]}', "[1] is no value"),
        ('{"dish": "soup", "size": "small", "sauce": 1}', "no parameter 'sauce'"),
    ],
)
async def test_what_a_model_gets_wrong_is_told_to_it(arguments: str, words: str) -> None:
    """The function does not run."""
    with pytest.raises(BadRequest):
        Tool(order).arguments(arguments)
    said = await Tools({"order": Tool(order)}, None).call("order", arguments)
    assert said.startswith("error: ")
    assert words in said


async def test_a_tool_that_raises_or_is_unknown_is_told_too() -> None:
    """The call goes on."""

    async def broken() -> None:
        raise OSError("no such table")

    tools = Tools({"broken": Tool(broken)}, None)
    assert await tools.call("broken", "") == "error: OSError: no such table"
    assert await tools.call("other", "") == "error: there is no tool 'other'"


def test_a_function_that_cannot_be_described_is_refused_at_once() -> None:
    """When the agent is written, not when it is called."""

    def untyped(city):  # type: ignore[no-untyped-def]
        """No type."""

    def strange(city: bytes) -> None:
        """A type JSON does not know."""

    for function in (untyped, strange):
        with pytest.raises(BadTool, match="city"):
            Tool(function)
