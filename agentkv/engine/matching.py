"""Which tokens an output may go on with: the state of one grammar in one output."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor

from agentkv.errors import EngineFailed, InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

__all__ = ["Matcher", "limits"]


def limits() -> LLParserLimits:
    """llguidance's own limits of size and work, and errors that quote neither grammar nor output."""
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False)


class Matcher:
    """Allows the tokens of one output. One thread calls it; the masks are computed in another, while the model runs.

    It belongs to one generation and ends with it: a turn that is rolled back leaves nothing here, and a turn that goes
    on with an output that was cut begins with the tokens that are in the ledger.
    """

    def __init__(self, grammar: LLMatcher, width: int, workers: Executor, param: str) -> None:
        """``grammar``: at its start, and nobody else's. ``width``: columns of the logits."""
        self._grammar = grammar
        self._width = width
        self._workers = workers
        self._param = param
        self._tokens = 0
        self._mask: Future[Tensor] | None = None
        self.finished = False
        """Whether the output is whole: an end token has come, or nothing else can follow."""

    def follow(self, said: Sequence[int]) -> None:
        """Go on from ``said``. ``InvalidRequest`` where it breaks the grammar."""
        if self._grammar.try_consume_tokens(list(said)) < len(said):
            raise InvalidRequest(
                f"the reply that was cut does not follow this {self._param}: go on without it, or send anew",
                param=self._param,
            )
        self._went_on(len(said))
        if self.finished:
            raise InvalidRequest("the reply that was cut is whole already: nothing can follow", param=self._param)

    def allowed(self) -> Tensor:
        """``[V] bool`` on the CPU: the tokens that may come next. Waits for what is still being computed.

        ``InvalidRequest`` where none may, or finding out is more work than the limits allow.
        """
        if self._mask is None:
            raise EngineFailed("a finished output was asked to go on")
        return self._mask.result()

    def advance(self, token: int) -> None:
        """``token`` was chosen. Begins to compute the next mask, unless it was the last."""
        self._settle()
        if not self._grammar.consume_token(token):
            raise EngineFailed(f"token {token} was chosen where the {self._param} does not allow it")
        self._went_on(1)

    def copy(self) -> Self:
        """Another output that has begun with the same tokens."""
        self._settle()
        twin = type(self)(self._grammar.deep_copy(), self._width, self._workers, self._param)
        twin._tokens, twin._mask, twin.finished = self._tokens, self._mask, self.finished
        return twin

    def _settle(self) -> None:
        """While a mask is computed, the grammar is not to be touched."""
        if self._mask is not None:
            self._mask.exception()

    def _went_on(self, tokens: int) -> None:
        self._tokens += tokens
        self.finished = self._grammar.is_stopped() and not self._grammar.is_error()
        self._mask = None if self.finished else self._workers.submit(self._compute)

    def _compute(self) -> Tensor:
        words = np.frombuffer(self._grammar.compute_bitmask(), dtype=np.uint8)
        if self._grammar.is_error():
            raise InvalidRequest(
                f"after {self._tokens} tokens the {self._param} takes more work than is allowed "
                f"({self._grammar.stop_reason()}): make its patterns and alternatives simpler",
                param=self._param,
            )
        bits = np.unpackbits(words, bitorder="little", count=self._width).view(np.bool_)
        if not bits.any():
            raise InvalidRequest(
                f"after {self._tokens} tokens no token of this model goes on with the {self._param}", param=self._param
            )
        return torch.from_numpy(bits)
