"""Two staging buffers that a thread of their own fills a layer ahead.

    model thread     attend 0 | attend 1 | attend 2 | attend 3
    fetching thread    fetch 1 | fetch 2  | fetch 3  |            layer n goes into buffer n mod 2

On CUDA each buffer has a pinned half in host memory, gathered into by the thread, and one on the device, copied to on a
stream of its own; events keep either from being overwritten while it is still read. On a CPU both are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Fill", "Prefetcher"]

Fill = Callable[[int, Tensor], int]
"""``fill(layer, flat)`` writes what the layer needs into ``flat``, and says how many numbers."""


@dataclass(slots=True, eq=False)
class _Buffer:
    host: Tensor
    device: Tensor
    arrived: torch.cuda.Event | None = None
    """The copy to the device is done: the host half may be written to."""
    free: torch.cuda.Event | None = None
    """Attention is done: the device half may be written to."""


class Prefetcher:
    """Serves one model thread; only :meth:`start`, :meth:`take` and :meth:`give_back` are called there."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._cuda = device.type == "cuda"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="agentkv-offload")
        self._stream = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._buffers: list[_Buffer] = []
        self._due: dict[int, Future[None]] = {}
        self._layers: Sequence[int] = ()
        self._fill: Fill = lambda layer, flat: 0

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers on the device."""
        return sum(b.device.numel() * b.device.element_size() for b in self._buffers)

    def start(self, layers: Sequence[int], numbers: int, fill: Fill) -> None:
        """Begin a step over ``layers``, none of which needs more than ``numbers``; drops what another left."""
        for future in self._due.values():
            future.cancel()
        wait(self._due.values())
        self._due.clear()
        if not self._buffers or not numbers <= self._buffers[0].host.numel() <= 4 * numbers:
            self._buffers = [self._allocated(numbers + numbers // 4) for _ in range(2)]
        self._layers, self._fill = layers, fill
        for layer in layers[:2]:
            self._fetch(layer)

    def take(self, layer: int) -> Tensor:
        """The layer's device buffer, filled; valid until it is given back."""
        if layer not in self._due:
            raise RuntimeError(f"layer {layer} was not fetched: layers are attended once a step, in order")
        self._due.pop(layer).result()
        buffer = self._of(layer)
        if buffer.arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(buffer.arrived)
        return buffer.device

    def give_back(self, layer: int) -> None:
        """Attention over the layer was issued: its buffer takes the layer after next."""
        if self._cuda:
            self._of(layer).free = torch.cuda.current_stream(self._device).record_event()
        after = self._layers.index(layer) + 2
        if after < len(self._layers):
            self._fetch(self._layers[after])

    def _of(self, layer: int) -> _Buffer:
        return self._buffers[self._layers.index(layer) % 2]

    def _fetch(self, layer: int) -> None:
        self._due[layer] = self._thread.submit(self._fetched, layer, self._of(layer), self._fill)

    def _fetched(self, layer: int, buffer: _Buffer, fill: Fill) -> None:
        if buffer.arrived is not None:
            buffer.arrived.synchronize()
        used = fill(layer, buffer.host)
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                if buffer.free is not None:
                    self._stream.wait_event(buffer.free)
                buffer.device[:used].copy_(buffer.host[:used], non_blocking=True)
                buffer.arrived = self._stream.record_event()

    def _allocated(self, numbers: int) -> _Buffer:
        with torch.inference_mode(False):  # the other thread writes to them too
            host = torch.empty(numbers, dtype=self._dtype, pin_memory=self._cuda)
            if not self._cuda:
                return _Buffer(host, host)
            device = torch.empty(numbers, dtype=self._dtype, device=self._device)
            assert self._stream is not None
            device.record_stream(self._stream)
            # The allocator may give out what earlier work on this stream still uses.
            return _Buffer(host, device, free=torch.cuda.current_stream(self._device).record_event())
