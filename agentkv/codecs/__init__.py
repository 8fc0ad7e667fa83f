"""KV tensors to bytes and back."""

from agentkv.codecs import compact as _compact  # noqa: F401
from agentkv.codecs import exact as _exact  # noqa: F401  (registers itself)
from agentkv.codecs import int4 as _int4  # noqa: F401
from agentkv.codecs import int8 as _int8  # noqa: F401
from agentkv.codecs import raw as _raw  # noqa: F401
from agentkv.codecs.contract import CODECS, Codec, Fit, KVBlock, MissingFit
from agentkv.codecs.fits import Codecs

__all__ = ["CODECS", "Codec", "Codecs", "Fit", "KVBlock", "MissingFit"]
