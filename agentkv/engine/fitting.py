"""Fitting codecs to one model, and finding how coarse a fit it bears.

A fit of ``compact`` is in units of its step: a coarser one is the same basis, multiplied. How coarse it may be differs
from model to model, so that it is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from blake3 import blake3

from agentkv.codecs import Fit, KVBlock
from agentkv.codecs.compact_fit import Sensitivity, fit_compact

__all__ = ["FITTERS", "coarser", "steps_to_try"]

FITTERS: Mapping[str, Callable[[Sequence[KVBlock], Sensitivity | None], Fit]] = MappingProxyType(
    {"compact": fit_compact}
)
"""By codec, what makes a fit of KV blocks that know their layers, and of what each head matters. Its basis is in steps
of 1."""

_OCTAVES = (0.0, 1.0, 2.0, 3.0)
_HALVINGS = 2


def coarser(fit: Fit, step: float) -> Fit:
    """``fit`` with steps ``step`` times as large; its digest is its own."""
    if step == 1:
        return fit
    tensors = {name: t * step if name.endswith(".basis") else t for name, t in fit.tensors.items()}
    digest = blake3(f"{fit.digest} in steps of {step!r}".encode()).hexdigest(length=16)
    return Fit(fit.codec, digest, tensors, {**fit.facts, "step": step, "of": fit.digest})


def steps_to_try(inside: Callable[[float], bool]) -> Iterator[float]:
    """Steps towards the coarsest that is ``inside``, which is asked of each step after it was given.

    1, 2, 4, 8 until one is not, then between the last two: within a quarter of an octave of the limit.
    """
    low = None
    for octave in _OCTAVES:
        yield 2**octave
        if not inside(2**octave):
            break
        low = octave
    else:
        return
    if low is None:
        return
    width = 1.0
    for _ in range(_HALVINGS):
        width /= 2
        step = round(2 ** (low + width), 3)
        yield step
        if inside(step):
            low += width
