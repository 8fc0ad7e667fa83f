"""How fast this machine multiplies matrices of a dtype: CPUs without bfloat16 units emulate it, many times slower."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

__all__ = ["ProductRates", "product_rates"]

_ROWS, _INNER, _OUTER = 128, 1024, 1024
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class ProductRates:
    """Billions of floating point operations a second in ``dtype`` and in float32, of a ``[128, 1024]·[1024, 1024]``."""

    dtype: str
    gflops: float
    gflops_float32: float

    @property
    def slower(self) -> float:
        """How many times slower than float32."""
        return self.gflops_float32 / self.gflops


def product_rates(dtype: torch.dtype, device: torch.device) -> ProductRates:
    """Measure it, with torch's threads as they are set. Takes a fraction of a second; the best of five counts."""
    single = _rate(torch.float32, device)
    own = single if dtype == torch.float32 else _rate(dtype, device)
    return ProductRates(str(dtype).removeprefix("torch."), own, single)


def _rate(dtype: torch.dtype, device: torch.device) -> float:
    rows = torch.ones(_ROWS, _INNER, dtype=dtype, device=device)
    weights = torch.ones(_OUTER, _INNER, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(_REPEATS + 1):
        started = time.perf_counter()
        torch.nn.functional.linear(rows, weights)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * _ROWS * _INNER * _OUTER / best / 1e9
