"""transformers' own way of running a model, for benchmarks to compare with. Nothing of agentkv takes part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

__all__ = ["Reference", "load_reference"]


class Reference:
    """A model with sdpa attention and a DynamicCache."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache: Any = None
        self._next: Tensor | None = None

    @torch.inference_mode()
    def prefill(self, rows: Sequence[Sequence[int]]) -> list[int]:
        """One forward over ``rows`` of equal length with a new cache: the likeliest next id of each."""
        self._cache = DynamicCache(config=self._model.config)
        return self._step(torch.tensor(rows, device=self._model.device))

    @torch.inference_mode()
    def decode(self) -> list[int]:
        """One more token of every row."""
        assert self._next is not None
        return self._step(self._next)

    def _step(self, ids: Tensor) -> list[int]:
        name = "cache" if "cache" in self._model.forward.__annotations__ else "past_key_values"
        output = self._model(input_ids=ids, use_cache=True, logits_to_keep=1, **{name: self._cache})
        self._next = output.logits[:, -1:].argmax(-1)
        found: list[int] = self._next[:, 0].tolist()
        return found


def load_reference(path: Path, dtype: torch.dtype, device: torch.device) -> Reference:
    """The model in ``path``, as transformers runs it by default."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )
    return Reference(model.to(device).eval())
