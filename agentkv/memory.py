"""When an allocation fails: recognising it, and telling it from other faults. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from agentkv.errors import CapacityExceeded

__all__ = ["OutOfDeviceMemory", "is_out_of_memory", "memory_told", "out_of_memory"]

_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "_ALLOC_FAILED")
"""What torch's allocators say, and libraries below it: CUDA, the CPU's on Linux and on Windows, cuBLAS."""


class OutOfDeviceMemory(CapacityExceeded):
    """An allocation failed under a turn, whose KV state is what it was. Sessions make room and try again before it is
    told: what users see is a plain ``CapacityExceeded``, with numbers."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that there was no memory, of the device or of the machine."""
    if isinstance(error, MemoryError | OutOfDeviceMemory) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def out_of_memory(error: BaseException) -> OutOfDeviceMemory:
    """``error`` as this package's own, its cause chained without its traceback.

    The frames in it hold the very tensors that have to go before anything is tried again.
    """
    ours = OutOfDeviceMemory(f"the device ran out of memory: {error}", needed=0, available=0, budget=0, retry_after=2.0)
    error.__traceback__ = error.__context__ = None
    ours.__cause__ = error
    return ours


@contextmanager
def memory_told() -> Iterator[None]:
    """Allocations that fail inside raise ``OutOfDeviceMemory``."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error) and not isinstance(error, OutOfDeviceMemory):
            raise out_of_memory(error)  # noqa: B904 (its cause is set)
        raise
