"""Digests that say whether stored state still fits: of weights, of what KV depends on, of what the ledger depends on.

Equal in every process and on every machine, and independent of where the files lie.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

if TYPE_CHECKING:
    from agentkv.models.local import LocalModel

__all__ = [
    "combined_digest",
    "file_digest",
    "kv_fingerprint",
    "session_fingerprint",
    "tokenizer_digest",
    "weights_digest_of_state_dict",
]

_FINGERPRINT_BYTES = 16
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json")
# fmt: off
_FREE_OF_KV = frozenset((
    # names, and what wrote the file
    "name_or_path", "_name_or_path", "transformers_version", "auto_map", "tokenizer_class", "model_name",
    # how it is run; the dtype in force is a part of its own
    "use_cache", "dtype", "torch_dtype", "torchscript", "return_dict", "output_attentions", "output_hidden_states",
    "gradient_checkpointing", "pretraining_tp", "attn_implementation",
    # training only
    "initializer_range", "initializer_factor", "attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop",
    "attn_pdrop", "dropout", "router_aux_loss_coef", "problem_type", "loss_type", "output_router_logits",
    # special tokens and generation defaults
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id",
    "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids",
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "temperature",
    "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "diversity_penalty", "num_return_sequences", "remove_invalid_values", "return_dict_in_generate",
    "output_scores", "prefix", "exponential_decay_length_penalty", "encoder_no_repeat_ngram_size",
    "task_specific_params",
    # classification
    "id2label", "label2id", "num_labels", "finetuning_task",
))
# fmt: on


def kv_fingerprint(
    local: LocalModel | str,
    config_dict: Mapping[str, Any],
    *,
    dtype: str,
    adapter: str | Mapping[str, Any] | None = None,
) -> str:
    """32 hex digits over all that KV depends on.

    ``local``: a model, or the digest of its weights. ``config_dict``: as of transformers' ``to_dict()``; rope and
    quantisation are in it, names, training and generation defaults are ignored. ``dtype``: torch's name of the dtype
    in force. ``adapter``: whatever identifies it, its scale included.
    """
    return _fingerprint(
        {
            "version": 1,
            "weights": local if isinstance(local, str) else local.digest,
            "config": _kv_part(config_dict),
            "dtype": dtype.removeprefix("torch."),
            "adapter": adapter,
        }
    )


def session_fingerprint(
    tokenizer: str | Path | Any, chat_template: str | Mapping[str, str] | None, special_tokens: Mapping[str, Any]
) -> str:
    """32 hex digits over all that the ledger depends on, but for each session's own template arguments.

    ``tokenizer``: a digest, or anything ``tokenizer_digest`` takes. ``special_tokens``: names to tokens or ids.
    """
    digest = tokenizer if isinstance(tokenizer, str) else tokenizer_digest(tokenizer)
    return _fingerprint({"version": 1, "tokenizer": digest, "template": chat_template, "special": special_tokens})


def tokenizer_digest(tokenizer: Path | Any) -> str:
    """Digest of a folder's tokenizer files, or of a live tokenizer. The two differ: stay with one of them."""
    if isinstance(tokenizer, Path):
        files = {name: file_digest(tokenizer / name) for name in _TOKENIZER_FILES if (tokenizer / name).is_file()}
        return combined_digest(files)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return _hex(tokenizer.get_vocab())
    # Padding and truncation are left there by whoever called it last; they are no part of what it is.
    return _hex({k: v for k, v in json.loads(backend.to_str()).items() if k not in ("padding", "truncation")})


def weights_digest_of_state_dict(state_dict: Mapping[str, Any]) -> str:
    """64 hex digits over names, dtypes, shapes and bytes, for a model that was never a file."""
    import torch

    digest = blake3()
    for name in sorted(state_dict):
        tensor = state_dict[name].detach().cpu().contiguous()
        digest.update(_canonical([name, str(tensor.dtype), list(tensor.shape)]))
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """blake3 of a file's bytes, 64 hex digits, on all cores."""
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def combined_digest(files: Mapping[str, str]) -> str:
    """One digest, 64 hex digits, of names and their files' digests."""
    return _hex(files)


def _kv_part(config: Mapping[str, Any]) -> dict[str, Any]:
    part = {}
    for key, value in config.items():
        if key in _FREE_OF_KV or key.startswith("_"):
            continue
        nested = key.endswith("_config") and key != "quantization_config" and isinstance(value, Mapping)
        part[key] = _kv_part(value) if nested else value
    return part


def _fingerprint(value: Any) -> str:
    return blake3(_canonical(value)).hexdigest(length=_FINGERPRINT_BYTES)


def _hex(value: Any) -> str:
    return blake3(_canonical(value)).hexdigest()


def _canonical(value: Any) -> bytes:
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _plain(value: Any) -> Any:
    """JSON with string keys only. ``TypeError`` for objects whose text might carry an address."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(item) for item in value), key=repr)
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value)
    if hasattr(value, "to_dict"):
        return _plain(value.to_dict())
    raise TypeError(f"a {type(value).__name__} has no stable digest")
