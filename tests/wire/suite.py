"""One fixture file of the wire contract: its cases, and the library code that answers each of their ops."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

import pytest

from acemq.errors import AcemqError
from tests.wire.matching import differences, revived

FIXTURES = Path(__file__).parents[2] / "fixtures" / "wire"

_NOTHING: Mapping[str, str] = MappingProxyType({})

Values: TypeAlias = dict[str, Any]
Op: TypeAlias = Callable[[Values], Values | Awaitable[Values]]
Back: TypeAlias = Callable[[Values, Values], None]


class Suite:
    """The cases of `{name}.json`. What the test session has run of them is counted, and told by `conftest.py`."""

    known: ClassVar[dict[str, Suite]] = {}

    def __init__(
        self,
        name: str,
        *,
        exact: tuple[str, ...] = (),
        others: tuple[str, ...] = (),
        not_yet: Mapping[str, str] = _NOTHING,
    ) -> None:
        """`exact`: ops whose headers are the exact set. `others`: keys that say what other libraries do.

        `not_yet`: cases about what the library does not have, and what that is. They are skipped in plain sight and
        not counted, and one of them that could be answered fails.
        """
        document = json.loads((FIXTURES / f"{name}.json").read_text("utf-8"))
        self.name, self.cases = name, {case["name"]: case for case in document["cases"]}
        assert len(self.cases) == len(document["cases"]), f"{name}.json has two cases of one name"
        assert not_yet.keys() <= self.cases.keys(), f"{name}.json has no case {min(not_yet.keys() - self.cases.keys())}"
        self._exact, self._others, self.not_yet = exact, others, not_yet
        self._ops: dict[str, Op] = {}
        self._backs: dict[str, Back] = {}
        self.run: set[str] = set()
        Suite.known[name] = self

    def op(self, name: str) -> Callable[[Op], Op]:
        """Answers `given` with what the library makes of it; what the library raises is an answer too."""

        def register(answer: Op) -> Op:
            assert name not in self._ops
            self._ops[name] = answer
            return answer

        return register

    def back(self, name: str) -> Callable[[Back], Back]:
        """The same case in the other direction: what is written reads back, what is read is written again."""

        def register(check: Back) -> Back:
            self._backs[name] = check
            return check

        return register

    @property
    def parametrize(self) -> pytest.MarkDecorator:
        return pytest.mark.parametrize("case", list(self.cases))

    async def check(self, case: str) -> None:
        """The test of one case."""
        if case in self.not_yet:
            assert await self.red(only=case), f"{case} can be answered now: take it out of not_yet"
            pytest.skip(f"not yet: {self.not_yet[case]}")
        self.run.add(case)
        problems = await self.problems(case)
        assert not problems, "\n".join(problems)

    async def problems(self, case: str) -> list[str]:
        given: Values = revived(self.cases[case]["given"])
        expect: Values = {k: v for k, v in self.cases[case]["expect"].items() if k not in self._others}
        op = given["op"]
        if op not in self._ops:
            return [f"no code answers op {op!r} of {self.name}.json"]
        try:
            answered = self._ops[op](given)
            answer = await answered if inspect.isawaitable(answered) else answered
        except AcemqError as error:
            if "error" not in expect:
                raise
            answer = {"error": error}
        problems = differences(expect, answer, exact_headers=op in self._exact)
        if not problems and "error" not in expect and op in self._backs:
            self._backs[op](given, expect)
        return problems

    async def red(self, *, beside: Collection[str] = (), most: int | None = None, only: str | None = None) -> list[str]:
        """The cases that fail now, outside of the count: at `most` so many, and none of `beside` or `not_yet`."""
        red: list[str] = []
        left_out = {*beside, *self.not_yet}
        for case in [only] if only else [case for case in self.cases if case not in left_out]:
            try:
                problems = await self.problems(case)
            except Exception:
                red.append(case)
            else:
                red += [case] if problems else []
            if most is not None and len(red) >= most:
                break
        return red
