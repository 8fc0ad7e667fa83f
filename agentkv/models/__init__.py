"""Models: the catalogue, pulling, what is on this machine, and digests. Imports neither torch nor transformers."""

from agentkv.models.catalogue import CATALOGUE, CatalogueEntry, Licence
from agentkv.models.child import Progress
from agentkv.models.fingerprints import (
    kv_fingerprint,
    session_fingerprint,
    tokenizer_digest,
    weights_digest_of_state_dict,
)
from agentkv.models.local import ListedModel, LocalModel, list_models, resolve
from agentkv.models.pull import pull, remove

__all__ = [
    "CATALOGUE",
    "CatalogueEntry",
    "Licence",
    "ListedModel",
    "LocalModel",
    "Progress",
    "kv_fingerprint",
    "list_models",
    "pull",
    "remove",
    "resolve",
    "session_fingerprint",
    "tokenizer_digest",
    "weights_digest_of_state_dict",
]
