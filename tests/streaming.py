"""StreamingLLM (https://arxiv.org/abs/2309.17453) in float64, from transformers' own model and nothing of agentkv.

The model runs with all its positions 0, so that its attention function is given keys and queries that have not been
turned (but carry YaRN's attention factor, as the model applies it). Each query attends over what its token found held,
at positions 0 … n-1 in the order of the ledger, itself last. Keys and values of a token thus depend on what was held
when it was computed, and stay as they are. Layers with a sliding window see their last ledger tokens, whatever the
policy dropped elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from families import Family
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PreTrainedModel

from agentkv.policies.retention import ItemView, RetentionPolicy, SessionView
from agentkv.types import Span

__all__ = ["InFloat64", "StreamingReference", "by_policy", "everything", "streaming_llm", "weights_in"]

_NAME = "streaming_reference"


class InFloat64(TorchFunctionMode):
    """Models make norms, angles and softmax in float32 whatever their dtype: here they make them in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


def weights_in(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model with its weights in ``dtype``; frequencies stay in float32, as transformers loads them."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


# -- what is held -----------------------------------------------------------------------------------------------------


def everything(length: int) -> list[list[int]]:
    """What each of ``length`` tokens finds held where nothing is evicted."""
    return [list(range(at)) for at in range(length)]


def streaming_llm(length: int, window: int, slack: int, sinks: int) -> list[list[int]]:
    """The same, where a full window goes down to ``window - slack`` tokens: ``sinks`` first ones, and the last."""
    found, held = [], []
    for at in range(length):
        if len(held) >= window:
            others = held[sinks:]
            held = held[:sinks] + others[len(others) - (window - slack - sinks) :]
        found.append(held)
        held = [*held, at]
    return found


def by_policy(length: int, policy: RetentionPolicy, pinned: int = 0, items: Sequence[ItemView] = ()) -> list[list[int]]:
    """The same, where the policy's own function is asked each time that its window is full."""
    assert policy.window is not None
    found, held = [], []
    for at in range(length):
        if len(held) >= policy.window:
            seen = [ItemView(Span(i.span.start, min(i.span.stop, at)), i.role, i.kind, i.turn) for i in items]
            view = SessionView(at, _spans(held), Span(0, pinned), tuple(i for i in seen if i.span.start < at))
            held = [index for span in policy.keep(view) for index in range(*span)]
        found.append(held)
        held = [*held, at]
    return found


def _spans(indices: Iterable[int]) -> tuple[Span, ...]:
    spans: list[Span] = []
    for index in indices:
        if spans and spans[-1].stop == index:
            spans[-1] = Span(spans[-1].start, index + 1)
        else:
            spans.append(Span(index, index + 1))
    return tuple(spans)


# -- the model --------------------------------------------------------------------------------------------------------


class StreamingReference:
    """One conversation with a family's model. ``dtype``: what its weights are rounded to before they become float64.

    ``positions``: ``cache`` as StreamingLLM has them; ``ledger`` leaves keys where they were computed.
    """

    def __init__(
        self,
        family: Family,
        dtype: torch.dtype = torch.float32,
        positions: Literal["cache", "ledger"] = "cache",
        model: PreTrainedModel | None = None,
    ) -> None:
        self._model = weights_in(weights_in(model or family.build(), dtype), torch.float64)
        self._model.set_attn_implementation(_NAME)
        self._model.config._experts_implementation = "eager"  # the grouped product of experts has no float64
        for module in self._model.modules():
            if hasattr(module, "layer_idx"):
                module.streaming_reference = self
        self._turns = [_frequencies(self._model, layer) for layer in range(self._model.config.num_hidden_layers)]
        self._interleaved = family.interleaved
        self._relative = positions == "cache"
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._seen: list[int] = []
        self._next = 0
        self._held: Sequence[int] = ()
        self._new: Sequence[int] = ()

    def jump(self, tokens: int) -> None:
        """The ledger goes on by tokens that nobody will ever see."""
        self._next += tokens

    def feed(self, ids: Sequence[int], held: Sequence[Sequence[int]], *, most: int = 256) -> Tensor:
        """Logits ``[T, V]`` behind each token; ``held[i]``: ledger indices that it finds, before itself.

        At most ``most`` tokens are computed at once, and only where each finds what the one before it found and it.
        """
        logits, start = [], 0
        while start < len(ids):
            stop = start + 1
            while (
                stop < len(ids)
                and stop - start < most
                and list(held[stop]) == [*held[start], *range(self._next, self._next + stop - start)]
            ):
                stop += 1
            logits.append(self._step(ids[start:stop], held[start]))
            start = stop
        return torch.cat(logits)

    def _step(self, ids: Sequence[int], held: Sequence[int]) -> Tensor:
        self._held, self._new = held, range(self._next, self._next + len(ids))
        self._next += len(ids)
        self._seen.extend(self._new)
        row = torch.tensor([list(ids)])
        with torch.no_grad(), InFloat64():
            logits: Tensor = self._model(input_ids=row, position_ids=torch.zeros_like(row), use_cache=False).logits[0]
        return logits

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """``query [Hq, T, D]`` over what each token may see: ``[1, T, Hq, Dv]``."""
        keys = self._keys[layer] = torch.cat([self._keys[layer], key], 1) if layer in self._keys else key
        values = self._values[layer] = torch.cat([self._values[layer], value], 1) if layer in self._values else value
        if window is None:
            seen = [*self._held, *self._new]
        else:
            seen = [index for index in self._seen if index > self._new[0] - window]
        rows = {index: row for row, index in enumerate(self._seen)}
        at = [rows[index] for index in seen]
        places = list(range(len(seen))) if window is None and self._relative else seen
        k = self._turned(layer, keys[:, at], places)
        q = self._turned(layer, query, places[-len(self._new) :])
        fold = query.shape[0] // key.shape[0]
        k, v = k.repeat_interleave(fold, 0), values[:, at].repeat_interleave(fold, 0)
        scores = q @ k.transpose(1, 2) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.tensor(list(self._new))[:, None] - torch.tensor(seen)[None, :]
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)], -1)
        weights = torch.softmax(scores, -1)[..., : len(seen)]
        return (weights @ v).transpose(0, 1)[None]

    def _turned(self, layer: int, x: Tensor, positions: Sequence[int]) -> Tensor:
        """``x [H, T, D]``, each token turned to its position: pairs of dimensions as complex numbers."""
        frequencies = self._turns[layer]
        n = len(frequencies)
        angles = torch.tensor(list(positions), dtype=torch.float64)[:, None] * frequencies
        turn = torch.polar(torch.ones_like(angles), angles)
        if self._interleaved:
            pairs = torch.view_as_complex(x[..., : 2 * n].unflatten(-1, (n, 2)).contiguous())
            return torch.cat([torch.view_as_real(pairs * turn).flatten(-2), x[..., 2 * n :]], -1)
        pairs = torch.complex(x[..., :n], x[..., n : 2 * n]) * turn
        return torch.cat([pairs.real, pairs.imag, x[..., 2 * n :]], -1)


def _frequencies(model: PreTrainedModel, layer: int) -> Tensor:
    """Radians a position of each pair of the layer's dimensions, as its configuration and rotary module say."""
    config = model.config
    types = getattr(config, "layer_types", None)
    if getattr(config, "no_rope_layers", None) and not config.no_rope_layers[layer]:
        return torch.zeros(0, dtype=torch.float64)
    if config.model_type == "cohere2" and types[layer] == "full_attention":
        return torch.zeros(0, dtype=torch.float64)
    buffers = {name.rpartition(".")[2]: buffer for name, buffer in model.named_buffers()}
    own = f"{types[layer]}_inv_freq" if types else "inv_freq"
    return buffers[own if own in buffers else "inv_freq"].double()


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    assert attention_mask is None
    attend: Callable[..., Tensor] = module.streaming_reference.attend
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(module.layer_idx, query[0], key[0], value[0], scale, sliding_window, softcap, s_aux), None


AttentionInterface.register(_NAME, _attention)
