"""Live KV: the layout contract and its implementations."""

from agentkv.kv import dynamic as _dynamic  # noqa: F401  (registers itself)
from agentkv.kv import offloaded as _offloaded  # noqa: F401
from agentkv.kv import paged as _paged  # noqa: F401
from agentkv.kv import quantized as _quantized  # noqa: F401
from agentkv.kv import static as _static  # noqa: F401
from agentkv.kv.contract import LAYOUTS, Evictions, Layout, SequenceKV

__all__ = ["LAYOUTS", "Evictions", "Layout", "SequenceKV"]
