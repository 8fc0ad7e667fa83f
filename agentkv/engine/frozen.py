"""A computed state as the store keeps it: cut into chunks, encoded, restored; with what that takes in bytes and time.

    0     16              256             512             …            length - tail        length
    | sinks |      lossy     |     lossy    |       …      |   lossy     |       tail         |
      exact                                                                exact, 128 to 383 tokens

Sliding-window layers stay exact. Cuts and codecs are the store's; no session and no file takes part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from agentkv.codecs import CODECS, Codec, KVBlock
from agentkv.codecs.spared import LOSSLESS_TAIL, SINKS
from agentkv.errors import InvalidRequest
from agentkv.kv.contract import Layout, SequenceKV
from agentkv.kv.staging import pinned_like, to_device
from agentkv.storage.chunkfile import MAX_CHUNK_TOKENS, ChunkMeta, Part, encode_chunk
from agentkv.storage.naming import chain_hash, ids_bytes, lookup_key
from agentkv.types import KVGeometry, Placement, Span

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["FEWEST_TOKENS", "STORE_THREADS", "EncodedState", "FrozenState"]

FEWEST_TOKENS = MAX_CHUNK_TOKENS + LOSSLESS_TAIL
"""A shorter state has no lossy chunk."""
STORE_THREADS = 2

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """KV of one layer group over ``span``, as a codec takes it."""

    group: int
    span: Span
    block: KVBlock


@dataclass(frozen=True, slots=True, eq=False)
class EncodedState:
    """The lossy spans through ``codec``, a payload a piece. ``nbytes``: them and their chunks' headers.

    ``session_nbytes``: the whole state, lossless parts included. Seconds to encode the lossy spans on one thread and on
    two.
    """

    codec: Codec
    payloads: tuple[bytes, ...]
    nbytes: int
    session_nbytes: int
    seconds_alone: float
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class RestoredState:
    """A live state, with the seconds that decoding its lossy spans took on one thread and on two."""

    kv: SequenceKV
    seconds_alone: float
    seconds: float


class FrozenState:
    """The state ``kv`` holds, which stays as it is. ``ValueError`` where something was evicted from it."""

    def __init__(self, layout: Layout[Any], kv: SequenceKV, kv_fingerprint: str) -> None:
        if not kv.placement.trivial:
            raise ValueError("a state from which something was evicted is not what is measured")
        self.ids = list(kv.ids)
        self.layout = layout
        self._fingerprint = kv_fingerprint
        geometry, length = layout.geometry, kv.length
        if all(group.window is not None for group in geometry.groups):
            raise InvalidRequest(
                "every layer of this model has a sliding window: its KV is always stored exact, there is no choice",
                param="model",
            )
        if length < FEWEST_TOKENS:
            raise InvalidRequest(
                f"{length:,} tokens hold no lossy chunk; the fewest that do are {FEWEST_TOKENS:,}", param="tokens"
            )
        sealed = (length - LOSSLESS_TAIL) // MAX_CHUNK_TOKENS * MAX_CHUNK_TOKENS
        self._spans = [Span(max(SINKS, start), stop) for start, stop in Span(0, sealed).split(MAX_CHUNK_TOKENS)]
        tail = list(Span(sealed, length).split(MAX_CHUNK_TOKENS))
        full = [(part.group, part.block.of(geometry, part.group, 0)) for part in kv.capture(Span(0, length))]
        self._lossy = [_Piece(g, span, block.cut(*span)) for span in self._spans for g, block in full]
        self._exact = [_Piece(g, span, block.cut(*span)) for span in [Span(0, SINKS), *tail] for g, block in full]
        self._exact += [
            _Piece(part.group, part.span, part.block.of(geometry, part.group, part.span.start))
            for part in kv.window_snapshot()
        ]
        exact = CODECS.get("exact")
        self._exact_payloads = [exact.encode(piece.block) for piece in self._exact]
        self._lossless_nbytes = sum(map(len, self._exact_payloads)) + len(tail) * self._header_nbytes(exact)

    @property
    def geometry(self) -> KVGeometry:
        """Shapes of the model's KV."""
        return self.layout.geometry

    @property
    def lossy_tokens(self) -> int:
        """Tokens that go through the codec."""
        return sum(map(len, self._spans))

    @property
    def lossy_nbytes(self) -> int:
        """Bytes of the numbers that go through the codec."""
        return sum(piece.block.nbytes for piece in self._lossy)

    @property
    def nbytes(self) -> int:
        """Bytes of all of its numbers."""
        return self.lossy_nbytes + sum(piece.block.nbytes for piece in self._exact)

    def chunks(self) -> list[KVBlock]:
        """The blocks that go through the codec, in ledger order, layer groups of one chunk one after the other."""
        return [piece.block for piece in self._lossy]

    def encode(self, codec: Codec) -> EncodedState:
        """Everything encoded, timed."""
        blocks = [piece.block for piece in self._lossy]
        with _one_torch_thread():
            payloads, alone = _timed(codec.encode, blocks, threads=1)
            _, shared = _timed(codec.encode, blocks, threads=STORE_THREADS)
        nbytes = sum(map(len, payloads)) + len(self._spans) * self._header_nbytes(codec)
        return EncodedState(codec, tuple(payloads), nbytes, nbytes + self._lossless_nbytes, alone, shared)

    def restore(self, state: EncodedState, room: int, layout: Layout[Any] | None = None) -> RestoredState:
        """A new live state with ``room`` for more tokens, every number of it decoded; timed. ``layout``: another one of
        the same geometry."""
        layout = layout or self.layout
        with _one_torch_thread():
            kv, alone = self._decoded(layout, state, room, threads=1)
            kv.close()
            kv, shared = self._decoded(layout, state, room, threads=STORE_THREADS)
        exact = CODECS.get("exact")
        for piece, payload in zip(self._exact, self._exact_payloads, strict=True):
            _fill(exact, payload, self._target(kv, piece))
        kv.restored(self.ids)
        return RestoredState(kv, alone, shared)

    def _decoded(
        self, layout: Layout[Any], state: EncodedState, room: int, *, threads: int
    ) -> tuple[SequenceKV, float]:
        """A state with its lossy spans in place, and the seconds that they took."""
        length = len(self.ids)
        kv = layout.open(0, length + room)
        kv.place(Placement.whole(length), room)
        targets = [self._target(kv, piece) for piece in self._lossy]
        jobs = list(zip(state.payloads, targets, strict=True))
        return kv, _timed(lambda job: _fill(state.codec, *job), jobs, threads=threads)[1]

    def _target(self, kv: SequenceKV, piece: _Piece) -> KVBlock:
        return kv.target(piece.group, piece.span).of(self.geometry, piece.group, piece.span.start)

    def _header_nbytes(self, codec: Codec) -> int:
        """What a chunk file takes beside its payload: measured on the first chunk of full-attention layers."""
        span = self._spans[0]
        ids = self.ids[: span.stop]
        chain = chain_hash(ids)
        meta = ChunkMeta(
            kv_fingerprint=self._fingerprint,
            tenant=chain_hash(()),
            lookup_key=lookup_key(b"", self._fingerprint, start=span.start, stop=span.stop, chain=chain),
            geometry=self.geometry,
            span=span,
            chain_start=chain_hash(ids[: span.start]),
            chain=chain,
            ids=ids_bytes(ids[span.start :]),
            position_base=span.start,
            resume_points=(span.stop,),
        )
        parts = [Part(piece.group, span, piece.block) for piece in self._lossy if piece.span == span]
        chunk = encode_chunk(meta, parts, codec)
        return chunk.nbytes - chunk.header.payload_nbytes


def _fill(codec: Codec, payload: bytes, target: KVBlock) -> None:
    """Decode into ``target``, by way of host memory where it is on another device."""
    if not target.keys[0].is_cuda:
        codec.decode(payload, target, codec.parameters())
        return
    aside = pinned_like(target, target.tokens)
    host = replace(target, keys=aside.keys, values=aside.values)
    codec.decode(payload, host, codec.parameters())
    to_device(host, target)


def _timed(work: Callable[[In], Out], inputs: Sequence[In], *, threads: int) -> tuple[list[Out], float]:
    """Results in order, and seconds."""
    started = time.perf_counter()
    if threads == 1:
        results = [work(one) for one in inputs]
    else:
        with ThreadPoolExecutor(threads) as pool:
            results = list(pool.map(work, inputs))
    return results, time.perf_counter() - started


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Codecs run side by side on their own threads: torch's inside each would only make them wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
