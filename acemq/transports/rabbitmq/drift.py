"""What an object of the broker has otherwise than is wanted, read from the broker's own words; and findings of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from acemq.plan import Finding
from acemq.topology import Declaration

_INEQUIVALENT = re.compile(
    r"inequivalent arg '(?P<argument>[^']+)' .*?: received (?P<wanted>.*?) but current is (?P<found>.*)"
)
_VALUE = re.compile(r"the value '(?P<value>.*)' of type '(?P<type>.*)'|'(?P<word>.*)'|(?P<none>none)")

UNLISTED = "AMQP cannot list bindings; it was declared again"
UNCHECKED = "AMQP cannot list bindings; not looked for"


def drift_of(declared: Declaration, text: str) -> Finding:
    """From the text of a 406. The broker names the first difference that it comes upon, and no other."""
    said = _INEQUIVALENT.search(text)
    if said is None:
        return Finding(verdict="drift", kind=declared.kind, name=declared.name, note=text)
    return Finding(
        verdict="drift",
        kind=declared.kind,
        name=declared.name,
        argument=said["argument"],
        wanted=_value(said["wanted"], said["argument"]),
        found=_value(said["found"], said["argument"]),
    )


def _value(text: str, argument: str) -> object:
    """From the broker's words: `none`, `'true'`, `the value '1000' of type 'signedint'`."""
    found = _VALUE.match(text)
    if found is None:
        return text
    if found["none"]:
        return "classic" if argument == "x-queue-type" else None
    value = found["word"] if found["word"] is not None else found["value"]
    if value in ("true", "false"):
        return value == "true"
    return int(value) if re.fullmatch(r"-?\d+", value) and found["type"] != "longstr" else value


def bindings_seen(declarations: Sequence[Declaration], findings: Sequence[Finding]) -> Iterator[Finding]:
    missing = {(finding.kind, finding.name) for finding in findings if finding.verdict == "missing"}
    for declared in declarations:
        if declared.kind == "binding":
            if missing.isdisjoint({("queue", declared.name), ("exchange", declared.exchange)}):
                yield Finding(verdict="present", kind="binding", name=name_of(declared), note=UNCHECKED)
            else:
                yield Finding(verdict="missing", kind="binding", name=name_of(declared))


def name_of(declared: Declaration) -> str:
    if declared.kind != "binding":
        return declared.name
    return f"{declared.name} <- {declared.exchange} on {declared.routing_key!r}"
