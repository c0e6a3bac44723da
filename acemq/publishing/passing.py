"""One draft on its way out: through the hooks, with its span open, and told once how it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.trace import Span

from acemq.telemetry import end_span, within_span

if TYPE_CHECKING:
    from acemq.interceptors import PublishChain
    from acemq.publishing.draft import Draft
    from acemq.publishing.outbound import Receipt


class Passing:
    """For one draft; the chain is the one that there was when its publish began."""

    __slots__ = ("_ended", "chain", "draft", "let_through", "span")

    def __init__(self, draft: Draft, chain: PublishChain | None) -> None:
        self.draft, self.chain = draft, chain
        self.span: Span | None = None
        self.let_through = False
        """Every `before_publish` has returned."""
        self._ended = False

    async def before(self) -> None:
        if self.chain is not None:
            with within_span(self.span):
                await self.chain.before(self.draft)
        self.let_through = True

    async def tell(self, ended: Receipt | BaseException, outcome: str = "refused") -> None:
        """Tell the hooks how it ended, once, and close the span behind them.

        Hooks are not told of what one of them has stopped. `outcome` is that of an error that names none.
        """
        if self._ended:
            return
        self._ended = True
        try:
            if self.let_through and self.chain is not None:
                with within_span(self.span):
                    await self.chain.told(self.draft, ended)
        finally:
            if self.span is not None:
                failed = ended if isinstance(ended, BaseException) else None
                end_span(self.span, getattr(failed, "outcome", outcome) if failed else "confirmed", failed)
