"""Headers as a text column keeps them: JSON, with the kinds that JSON does not know under a name of one `$`."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, cast

from acemq.headers import Headers, HeaderValue


def to_text(headers: Headers) -> str:
    return json.dumps({name: _plain(value) for name, value in headers.items()}, separators=(",", ":"))


def from_text(text: str) -> dict[str, HeaderValue]:
    return {name: _value(plain) for name, plain in json.loads(text).items()}


def _plain(value: HeaderValue) -> Any:
    match value:
        case bytes():
            return {"$bytes": base64.b64encode(value).decode()}
        case datetime():
            return {"$time": round(value.timestamp())}  # AMQP carries whole seconds
        case float() if not math.isfinite(value):
            return {"$float": repr(value)}
        case Mapping():
            return {"$map": {name: _plain(inner) for name, inner in value.items()}}
        case list() | tuple():
            return [_plain(inner) for inner in value]
        case _:
            return value


def _value(plain: Any) -> HeaderValue:
    if isinstance(plain, list):
        return [_value(inner) for inner in plain]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(plain, dict):
        return cast("HeaderValue", plain)
    ((kind, inner),) = cast("dict[str, Any]", plain).items()
    match kind:
        case "$bytes":
            return base64.b64decode(inner)
        case "$time":
            return datetime.fromtimestamp(inner, UTC)
        case "$float":
            return float(inner)
        case _:
            return {name: _value(each) for name, each in inner.items()}
