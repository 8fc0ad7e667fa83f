"""A generation that begins anew, after its job was rolled back: what it gave is not given a second time."""

from __future__ import annotations

from agentkv.engine.job import TokenSink, Verdict
from agentkv.engine.sampling import TokenLogprob
from agentkv.memory import OutOfDeviceMemory

__all__ = ["OnceSink"]


class OnceSink(TokenSink):
    """Hands each token on once. Same seed, same session, same output: what comes again is compared.

    Where it differs after all (on a device on which bits depend on the neighbours), what was handed on cannot be taken
    back: ``OutOfDeviceMemory``, as if nothing had been tried again.
    """

    def __init__(self, sink: TokenSink) -> None:
        self._sink = sink
        self._had: list[int] = []
        self._at = 0

    def again(self) -> None:
        """The generation begins anew."""
        self._at = 0

    def push(self, token: int, logprob: TokenLogprob | None) -> Verdict:
        at, self._at = self._at, self._at + 1
        if at == len(self._had):
            self._had.append(token)
            return self._sink.push(token, logprob)
        if token != self._had[at]:
            raise OutOfDeviceMemory(
                f"the device ran out of memory; begun anew, the generation differs at token {at + 1:,} of the "
                f"{len(self._had):,} that were given out",
                needed=0,
                available=0,
                budget=0,
            )
        return "go on"
