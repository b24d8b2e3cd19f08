"""Python functions that a language model may call.

What a model must know of a function is read off it: its name, its docstring, the types of its parameters.  What a model
gets wrong (arguments that are no JSON, of the wrong type, or missing) is told to the model, which tries again.
"""

from __future__ import annotations

import asyncio
import enum
import inspect
import json
import logging
import re
import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Union

from breeze_rtc.errors import BadRequest

log = logging.getLogger(__name__)

ToolFunction = Callable[..., Any]
_SIMPLE: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}


class BadTool(BadRequest):
    """A function cannot be offered to a model: a parameter has no type, or one that JSON does not know."""


class Tool:
    """One function with its schema.

    Parameters may be str, int, float, bool, Literal, Enum, list and dict of these, and `| None`.  A parameter called
    `session` gets the call's AgentSession and is not shown to the model.  The docstring's first paragraph describes the
    function; a line of it that begins with `name:` describes a parameter.
    """

    def __init__(self, function: ToolFunction) -> None:
        """Raises BadTool."""
        self.function = function
        self.name = function.__name__
        text = inspect.getdoc(function) or ""
        self.description = " ".join(text.split("\n\n")[0].split())
        hints = typing.get_type_hints(function)
        signature = inspect.signature(function)
        self.takes_session = "session" in signature.parameters
        self._types: dict[str, Any] = {}
        self._required: list[str] = []
        properties: dict[str, Any] = {}
        for name, parameter in signature.parameters.items():
            if name == "session":
                continue
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name not in hints:
                raise BadTool(f"the tool {self.name!r} needs a type for its parameter {name!r}")
            self._types[name] = hints[name]
            try:
                properties[name] = schema(hints[name])
            except BadTool as error:
                raise BadTool(f"the parameter {name!r} of the tool {self.name!r}: {error}") from None
            if match := re.search(rf"^\s*{re.escape(name)}:\s*(.+)$", text, re.MULTILINE):
                properties[name]["description"] = match.group(1).strip()
            if parameter.default is parameter.empty:
                self._required.append(name)
        self.parameters = {"type": "object", "properties": properties, "required": self._required}
        """JSON Schema of the arguments."""

    def arguments(self, text: str) -> dict[str, Any]:
        """The arguments in a model's JSON, as Python values.  Raises BadRequest with words for the model."""
        try:
            given = json.loads(text or "{}")
        except ValueError:
            raise BadRequest("the arguments are not JSON") from None
        if not isinstance(given, dict):
            raise BadRequest("the arguments are not a JSON object")
        if unknown := sorted(given.keys() - self._types.keys()):
            raise BadRequest(f"there is no parameter {unknown[0]!r}")
        if missing := [name for name in self._required if name not in given]:
            raise BadRequest(f"the parameter {missing[0]!r} is missing")
        return {name: _value(name, given[name], self._types[name]) for name in given}


class Tools:
    """The tools of one agent in one call."""

    def __init__(self, tools: Mapping[str, Tool], session: object) -> None:
        self._tools = tools
        self._session = session

    def __bool__(self) -> bool:
        return bool(self._tools)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """What a request to an OpenAI-compatible endpoint carries as `tools`."""
        return [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            }
            for tool in self._tools.values()
        ]

    async def call(self, name: str, arguments: str) -> str:
        """Run one and return what to tell the model: the result, as JSON unless it is text, or what went wrong.

        A plain function runs in a thread, so that it holds up no call's sound.
        """
        tool = self._tools.get(name)
        if tool is None:
            return f"error: there is no tool {name!r}"
        try:
            values = tool.arguments(arguments)
            if tool.takes_session:
                values["session"] = self._session
            if inspect.iscoroutinefunction(tool.function):
                result = await tool.function(**values)
            else:
                result = await asyncio.to_thread(tool.function, **values)
                if isinstance(result, Awaitable):
                    result = await result
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except BadRequest as error:
            return f"error: {error}"
        except Exception as error:
            log.error("the tool %s failed", name, exc_info=error)
            return f"error: {type(error).__name__}: {error}"


def schema(kind: Any) -> dict[str, Any]:
    """JSON Schema of a type.  Raises BadTool."""
    if kind in _SIMPLE:
        return {"type": _SIMPLE[kind]}
    if kind is list or kind is dict:
        return {"type": "array" if kind is list else "object"}
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return {"type": _SIMPLE[type(arguments[0])], "enum": list(arguments)}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"type": _SIMPLE.get(type(next(iter(kind)).value), "string"), "enum": [member.value for member in kind]}
    if origin in (list, Sequence):
        return {"type": "array", "items": schema(arguments[0])}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": schema(arguments[1])}
    if origin in (Union, types.UnionType):
        kinds = [schema(argument) for argument in arguments if argument is not type(None)]
        null = [{"type": "null"}] if type(None) in arguments else []
        return {"anyOf": kinds + null}
    raise BadTool(f"{kind!r} is no type that JSON knows")


def _value(name: str, given: Any, kind: Any) -> Any:
    """The JSON value `given` as a `kind`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        for argument in arguments:
            try:
                return _value(name, given, argument)
            except BadRequest:
                continue
    elif kind is type(None):
        if given is None:
            return None
    elif origin is Literal:
        if given in arguments:
            return given
    elif origin in (list, Sequence) or kind is list:
        if isinstance(given, list):
            return [_value(name, item, arguments[0]) if arguments else item for item in given]
    elif origin in (dict, Mapping) or kind is dict:
        if isinstance(given, dict):
            return {key: _value(name, item, arguments[1]) if arguments else item for key, item in given.items()}
    elif isinstance(kind, type) and issubclass(kind, enum.Enum):
        if any(given == member.value for member in kind):
            return kind(given)
    elif kind is float and isinstance(given, int | float) and not isinstance(given, bool):
        return float(given)
    elif kind is int and isinstance(given, float) and given.is_integer():
        return int(given)
    elif isinstance(given, kind) and (kind is bool or not isinstance(given, bool)):
        return given
    raise BadRequest(f"{given!r} is no value for the parameter {name!r}")
