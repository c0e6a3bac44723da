"""The notation of the fixtures (CONTRACT.md, appendix A): what a value has to be, and every place where one is not."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from acemq.errors import AcemqError, FatalError

_TYPES = {"str": str, "int": int}


def revived(value: Any) -> Any:
    """A `given` as Python values: `{"$hex": …}` is bytes."""
    if isinstance(value, dict):
        return bytes.fromhex(value["$hex"]) if value.keys() == {"$hex"} else {k: revived(v) for k, v in value.items()}
    return [revived(item) for item in value] if isinstance(value, list) else value


def differences(expect: Mapping[str, Any], answer: Mapping[str, Any], *, exact_headers: bool) -> list[str]:
    """Every key of `expect` that `answer` does not meet.

    `headers` is the exact set only where the appendix says so; everything else is compared whole.
    """
    found: list[str] = []
    headers: Mapping[str, Any] = answer.get("headers") or {}
    for key, want in expect.items():
        match key:
            case "absent":
                found += [f"header {name} should not be there" for name in want if name in headers]
            case "header_types":
                found += [
                    f"header {name} is a {type(headers.get(name)).__name__}, not {kind}"
                    for name, kind in want.items()
                    if type(headers.get(name)) is not _TYPES[kind]
                ]
            case "headers":
                if exact_headers:
                    found += [f"header {name} = {headers[name]!r} is too much" for name in headers.keys() - want.keys()]
                found += [
                    f"header {name} is {headers.get(name)!r}, not {value!r}"
                    for name, value in want.items()
                    if not matches(value, headers.get(name), headers)
                ]
            case _ if key not in answer:
                found.append(f"{key} is not answered")
            case _ if not matches(want, answer[key], {**headers, **answer}):
                found.append(f"{key} is {answer[key]!r}, not {want!r}")
            case _:
                pass
    return found


def matches(want: Any, have: Any, beside: Mapping[str, Any]) -> bool:
    """`beside` is the object that `have` stands in, for `$same_as`."""
    match want:
        case {"$hex": text}:
            return type(have) is bytes and have == bytes.fromhex(text)
        case {"$re": pattern}:
            return isinstance(have, str) and re.fullmatch(pattern, have) is not None
        case {"$one_of": choices}:
            return any(matches(choice, have, beside) for choice in choices)
        case {"$same_as": key}:
            return key in beside and have == beside[key]
        case {"$now_ms": True}:
            return type(have) is int and abs(have - time.time() * 1000) <= 5_000
        case dict():
            return (
                isinstance(have, Mapping)
                and want.keys() == have.keys()
                and all(matches(value, have[key], {**beside, **have}) for key, value in want.items())
            )
        case list():
            return (
                isinstance(have, Sequence)
                and len(want) == len(have)
                and all(
                    matches(left, right, beside) for left, right in zip(_in_order(want), _in_order(have), strict=True)
                )
            )
        case True if isinstance(have, AcemqError):  # `error: true`
            return True
        case "fatal":
            return isinstance(have, FatalError)
        case bool() | None:
            return want is have
        case _:
            return not isinstance(have, bool) and bool(want == have)


def _in_order(values: Sequence[Any]) -> Sequence[Any]:
    """Broker objects by name; steps, which look alike but have no `durable` and no `queue`, as they stand."""
    if values and all(isinstance(value, Mapping) and ("durable" in value or "queue" in value) for value in values):
        return sorted(values, key=lambda value: (str(value.get("name")), str(value.get("queue"))))
    return values
