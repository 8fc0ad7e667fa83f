"""The ``int4`` codec: 16 levels, a step of about a third of a standard deviation."""

from __future__ import annotations

from agentkv.codecs.contract import CODECS
from agentkv.codecs.grids import Grid
from agentkv.codecs.uniform import Uniform

__all__ = ["Int4"]


class Int4(Uniform):
    """About 4x on bf16 KV."""

    name = "int4"
    keys = Grid(levels=32, fineness=4)
    values = Grid(levels=12, fineness=4)
    bits = 3.95


CODECS.register("int4")(Int4())
