"""Which messages, in words: `error~timeout`, `how!=parked`, `header.x-tenant=acme`."""

from __future__ import annotations

import re
from collections.abc import Callable

from acemq.errors import ConfigurationError
from acemq.message import Message, SetAside
from acemq.patterns.replay import replays_of

Accepts = Callable[[Message[bytes]], bool]

_NOTHING = SetAside("")

FIELDS: dict[str, Callable[[Message[bytes]], object]] = {
    "id": lambda message: message.id,
    "type": lambda message: message.type,
    "correlation": lambda message: message.correlation_id,
    "attempt": lambda message: message.attempt,
    "replays": lambda message: replays_of(message.wire_headers),
    "error": lambda message: (message.failure or _NOTHING).text,
    "how": lambda message: (message.failure or _NOTHING).how,
    "error-type": lambda message: (message.failure or _NOTHING).error_type,
    "queue": lambda message: (message.failure or _NOTHING).queue,
    "by": lambda message: (message.failure or _NOTHING).by,
    "body": lambda message: message.body.decode(errors="replace"),
}
HEADER = "header."

_FORM = re.compile(r"(?P<field>[A-Za-z][^=!~]*)(?P<operator>!=|=|~)(?P<value>.*)", re.DOTALL)


def parse(text: str) -> Accepts:
    """`FIELD=VALUE`, `FIELD!=VALUE`, or `FIELD~TEXT`: contains it, in capitals or not. Refuses what is none of them."""
    form = _FORM.fullmatch(text)
    if form is None:
        raise ConfigurationError(
            f"{text!r} is no filter; write FIELD=VALUE, FIELD!=VALUE or FIELD~TEXT, where FIELD is {_known()}"
        )
    read, operator, value = _reader(form["field"].strip()), form["operator"], form["value"]
    match operator:
        case "=":
            return lambda message: read(message) == value
        case "!=":
            return lambda message: read(message) != value
        case _:
            wanted = value.casefold()
            return lambda message: wanted in read(message).casefold()


def _reader(field: str) -> Callable[[Message[bytes]], str]:
    """The field as text; empty where a message has none."""
    if field.startswith(HEADER) and field != HEADER:
        name = field.removeprefix(HEADER)
        return lambda message: _text(message.wire_headers.get(name))
    if field not in FIELDS:
        raise ConfigurationError(f"there is no field {field!r} to filter by; there are {_known()}")
    value_of = FIELDS[field]
    return lambda message: _text(value_of(message))


def _text(value: object) -> str:
    match value:
        case None:
            return ""
        case bytes():
            return value.decode(errors="replace")
        case bool():
            return str(value).lower()
        case _:
            return str(value)


def _known() -> str:
    return f"{', '.join(FIELDS)} or {HEADER}NAME"
