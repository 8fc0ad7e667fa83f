"""From a local model folder to something the engine can run. Blocking: call it off the event loop."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentkv.engine.adapter import ATTENTION_NAME, ModelAdapter
from agentkv.engine.engine import Engine
from agentkv.engine.grammars import Grammars
from agentkv.engine.job import longest_piece
from agentkv.engine.packing import pack_linears
from agentkv.errors import InvalidRequest, ModelUnavailable
from agentkv.kv.contract import LAYOUTS, Layout
from agentkv.kv.recurrent import layout_for
from agentkv.models import LocalModel
from agentkv.models.fingerprints import kv_fingerprint, session_fingerprint, tokenizer_digest
from agentkv.settings import Settings
from agentkv.types import Fingerprints

__all__ = ["LoadedModel", "load", "pick_device"]

_CPU_PIECE, _CUDA_PIECE = 512, 2048
_CPU_JOINT = 32
"""See ``Scheduler``: bf16 products of at most so many rows give bits that do not depend on the number."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to serve: its folder, adapter, layout, engine (not started), tokenizer where it has one.

    ``grammars``: of outputs that have to follow a schema.
    """

    name: str
    path: Path
    adapter: ModelAdapter
    layout: Layout[Any]
    engine: Engine
    tokenizer: Any | None
    fingerprints: Fingerprints
    end_ids: frozenset[int]
    piece: int
    grammars: Grammars

    @property
    def forgets(self) -> bool:
        """Whether some layers see a sliding window only, or carry a state that each token overwrites."""
        return any(group.window is not None for group in self.adapter.geometry.groups)

    @property
    def model_type(self) -> str:
        """The model's family, as its configuration names it."""
        return str(self.adapter.model.config.model_type)

    @property
    def context_limit(self) -> int:
        """Tokens that a conversation may have; a very large number where the model names no limit."""
        return self.adapter.context_limit or 2**31 - 1


def pick_device(name: str) -> torch.device:
    """``auto`` is CUDA where there is one. ``InvalidRequest`` for a device that is not here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidRequest(
            f"device {name!r} is not one torch knows: use cpu, cuda or cuda:N", param="device"
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest("device 'cuda' was asked for, but torch sees no CUDA device here", param="device")
    if device.type not in ("cpu", "cuda"):
        raise InvalidRequest(f"device {name!r} is not supported: use cpu or cuda", param="device")
    return device


def load(local: LocalModel, settings: Settings) -> LoadedModel:
    """Load weights and tokenizer, check that the model can be right here, prepare the engine."""
    device = pick_device(settings.device)
    make_layout = LAYOUTS.get("dynamic" if settings.layout == "auto" else settings.layout)
    if settings.threads and device.type == "cpu":
        torch.set_num_threads(settings.threads)
    dtype = "auto" if settings.dtype == "auto" else getattr(torch, settings.dtype)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            local.path, dtype=dtype, attn_implementation=ATTENTION_NAME, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelUnavailable(local.name, {str(local.path): str(error).splitlines()[0]}) from error
    adapter = ModelAdapter(model.to(device))
    pack_linears(model)
    layout = layout_for(make_layout, adapter.geometry, device)
    if adapter.switches:
        layout.rebase_at = 0  # at each eviction: the next position is then what is held, which the window bounds
    piece = settings.prefill_tokens or (_CPU_PIECE if device.type == "cpu" else _CUDA_PIECE)
    layout.expect_pieces(longest_piece(piece))
    tokenizer = _tokenizer(local)
    end_ids = _end_ids(model, tokenizer)
    grammars = Grammars(tokenizer, adapter.vocab_size, end_ids)
    if settings.prepare_schemas:
        grammars.warm()
    return LoadedModel(
        name=local.name,
        path=local.path,
        adapter=adapter,
        layout=layout,
        engine=Engine(
            adapter, layout, joint_rows=settings.joint_rows or (_CPU_JOINT if device.type == "cpu" else 2 * piece)
        ),
        tokenizer=tokenizer,
        fingerprints=Fingerprints(
            kv=kv_fingerprint(local, model.config.to_dict(), dtype=adapter.geometry.dtype),
            session=_session_fingerprint(tokenizer),
        ),
        end_ids=end_ids,
        piece=piece,
        grammars=grammars,
    )


def _tokenizer(local: LocalModel) -> Any | None:
    """The folder's tokenizer; ``None`` where it carries none, which leaves token-level sessions."""
    known = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")
    if not any((local.path / name).is_file() for name in known):
        return None
    return AutoTokenizer.from_pretrained(os.fspath(local.path), local_files_only=True)


def _session_fingerprint(tokenizer: Any | None) -> str:
    """``<tokenizer>.<template>``: another tokenizer cannot read a ledger, another template can."""
    if tokenizer is None:
        return "none.none"
    reads = session_fingerprint(tokenizer_digest(tokenizer), None, tokenizer.special_tokens_map)
    return f"{reads}.{session_fingerprint('', tokenizer.chat_template, {})}"


def _end_ids(model: Any, tokenizer: Any | None) -> frozenset[int]:
    """Ids that end a reply: the generation config's, and the tokenizer's end token."""
    found: set[int] = set()
    declared: int | Sequence[int] | None = getattr(model.generation_config, "eos_token_id", None)
    if declared is not None:
        found.update([declared] if isinstance(declared, int) else declared)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    return frozenset(found)
