"""The one place that touches transformers' model, cache and attention API.

A model runs on one packed row: ``input_ids [1, T]`` and ``position_ids [1, T]`` of all sessions of a step. Its
attention calls come back here through transformers' ``AttentionInterface``; no mask function is registered under our
name, so the model builds no mask. The object handed to the model as its cache only stores what it is given, in the
layout.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from agentkv.engine.recurrence import (
    RECURRENT_TYPES,
    StateCache,
    check_carried,
    recurrent_groups,
    refuse_unknown_recurrence,
)
from agentkv.engine.rotations import Projections, find_rotations, probe_positions
from agentkv.errors import Unsupported
from agentkv.kv.contract import AttentionTraits, Layout
from agentkv.kv.recurrent import Carried, RecurrentLayout
from agentkv.types import KVGeometry, LayerGroup

__all__ = ["ATTENTION_NAME", "ModelAdapter", "StepInput"]

ATTENTION_NAME = "agentkv"
_SLIDING_TYPES = {"sliding_attention", "hybrid_sliding"}
_ATTENTION_TYPES = {"full_attention", *_SLIDING_TYPES}
_EMPTY_TYPES = {"mlp", "moe"}
"""Layers that keep nothing of a token."""
_LAYER_TYPES = _ATTENTION_TYPES | RECURRENT_TYPES | _EMPTY_TYPES
_HARMLESS_ARGUMENTS = {
    "cache",
    "cache_position",
    "hidden_states",
    "layer_idx",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
}
"""What models pass on to their attention function that does not change softmax attention over the cached keys."""


@dataclass(frozen=True, slots=True)
class StepInput:
    """One packed step: ``ids`` and ``positions`` of T tokens, and the rows whose logits are wanted, in order."""

    ids: Sequence[int]
    positions: Sequence[int]
    logit_rows: Sequence[int]


@dataclass(frozen=True, slots=True)
class _LayerCall:
    """What the probe saw of one layer's attention call."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    traits: AttentionTraits


class _StepCache(StateCache):
    """Stands where the model expects its cache. ``update`` stores the new keys and values, and returns them.

    Without a layout it is the probe's: it notes what each layer stores and asks for.
    """

    is_compileable = False

    def __init__(self, layout: Layout[Any] | None, meta: Any, carried: Carried | None = None) -> None:
        super().__init__(carried or Carried({}))
        self.layout = layout
        self.meta = meta
        self.calls: dict[int, _LayerCall] = {}
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}
        self.seen: dict[int, Projections] = {}

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if self.layout is not None:
            self.layout.write(layer_idx, keys[0], values[0], self.meta)
        else:
            self.stored[layer_idx] = keys, values
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always given explicitly; no model may derive them from here."""
        return 0


@dataclass(slots=True)
class _Running:
    """The step that the model thread is in, found by the attention function through the module's own attribute."""

    cache: _StepCache | None = None


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention contract: ``query [1, Hq, T, D]`` → ``([1, T, Hq, Dv], None)``.

    ``key`` and ``value`` are the step's new ones only: the layout holds all.
    """
    cache = module.agentkv_running.cache
    if cache.layout is None:
        if attention_mask is not None:
            raise Unsupported("an attention mask or bias", "the model adds one to its scores")
        if is_causal is False or getattr(module, "is_causal", True) is False:
            raise Unsupported("bidirectional attention", "cached keys would depend on tokens that come later")
        for name, argument in kwargs.items():
            if argument is not None and name not in _HARMLESS_ARGUMENTS:
                raise Unsupported(f"attention argument {name!r}", "its meaning is not known here")
        traits = AttentionTraits(query.shape[-1] ** -0.5 if scaling is None else float(scaling), softcap, s_aux)
        return _probe(cache, module, query, key, value, sliding_window, traits), None
    traits = module.agentkv_traits
    return cache.layout.attend(module.layer_idx, query[0], cache.meta, traits)[None].contiguous(), None


def _probe(
    cache: _StepCache,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    traits: AttentionTraits,
) -> Tensor:
    """Record what the layer asks for and is given. The output is finite, and does not depend on positions."""
    layer = module.layer_idx
    stored = cache.stored.get(layer)
    if stored is None or stored[0] is not key or stored[1] is not value:
        name = f"{type(module).__name__} of layer {layer}"
        raise Unsupported(name, "it attends to other keys than those it stores (shared or compressed KV)")
    cache.seen[layer] = Projections(query[0], key[0], value[0])
    cache.calls[layer] = _LayerCall(key.shape[1], key.shape[3], value.shape[3], window, traits)
    module.agentkv_traits = traits
    fold = query.shape[1] // key.shape[1]
    return value.repeat_interleave(fold, dim=1).transpose(1, 2).contiguous()


AttentionInterface.register(ATTENTION_NAME, _attention)


@dataclass(slots=True)
class ModelAdapter:
    """A causal language model behind the packed-step interface. Used by the model thread only.

    ``context_limit``: tokens that a session may hold, as the model was made; where a longer context would change its
    rotary frequencies, no more than keep them. Raises ``Unsupported``, naming the feature, for models that cannot be
    right here.
    """

    model: PreTrainedModel
    geometry: KVGeometry = field(init=False)
    vocab_size: int = field(init=False)
    context_limit: int | None = field(init=False)
    _switch: int | None = field(init=False)
    _running: _Running = field(init=False, default_factory=_Running)
    _cache_argument: str = field(init=False)

    def __post_init__(self) -> None:
        model = self.model
        config = model.config.get_text_config(decoder=True)
        _refuse(model, config)
        model.eval()  # type: ignore[no-untyped-call]
        model.requires_grad_(False)
        model.set_attn_implementation(ATTENTION_NAME)
        parameters = inspect.signature(model.forward).parameters
        if "position_ids" not in parameters or "logits_to_keep" not in parameters:
            raise Unsupported(config.model_type, "its forward takes no position_ids or no logits_to_keep")
        # transformers 5.19 and before say past_key_values, later ones cache.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                module.agentkv_running = self._running  # type: ignore[assignment]
        limit = getattr(config, "max_position_embeddings", None)
        self._switch = _rope_switch(config)
        self.context_limit = min((int(n) for n in (limit, self._switch) if n), default=None)
        self.vocab_size = int(config.vocab_size)
        positions = probe_positions(self.context_limit)
        still, moved = self._probe([0] * len(positions)), self._probe(positions)
        self.geometry = _geometry(still, config, model.dtype, self.context_limit)
        rotations, fixed = find_rotations(model, still.seen, moved.seen, positions)
        if self.geometry.recurrent:
            recurrent = [self.geometry.groups[index] for index in self.geometry.recurrent]
            check_carried(config.model_type, recurrent, self._carry)
            fixed = "its recurrent layers have seen every token and can forget none"
        self.geometry = replace(self.geometry, rotations=rotations, fixed=fixed)

    @property
    def switches(self) -> bool:
        """Whether no token may be at a position from ``context_limit`` on, however few tokens are held."""
        return self._switch is not None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    def _probe(self, positions: Sequence[int]) -> _StepCache:
        """Run a few tokens, the same ones each time, and look at each layer's attention call."""
        cache, name = _StepCache(None, None), self.model.config.model_type
        try:
            self._forward(range(1, len(positions) + 1), positions, [0, 1], cache)
        except Unsupported:
            raise
        except Exception as error:
            told = f"({type(error).__name__}: {error})"
            if _carries(self.model, self.model.config.get_text_config(decoder=True)):
                raise Unsupported(
                    "recurrent state", f"{name} keeps it in a way that is not known here {told}"
                ) from error
            raise Unsupported(name, f"its forward does not run on a packed row {told}") from error
        return cache

    def _carry(self, ids: Sequence[int], carried: Carried) -> Tensor:
        """Logits ``[T, vocab]`` of ``ids``, which see one another through recurrent layers only."""
        return self._forward(ids, [0] * len(ids), range(len(ids)), _StepCache(None, None, carried))

    def _forward(self, ids: Sequence[int], positions: Sequence[int], rows: Sequence[int], cache: _StepCache) -> Tensor:
        device = self.device
        self._running.cache = cache
        try:
            with torch.inference_mode():
                output = self.model(
                    input_ids=torch.tensor([list(ids)], device=device),
                    position_ids=torch.tensor([list(positions)], device=device),
                    logits_to_keep=torch.tensor(list(rows), device=device),
                    use_cache=True,
                    return_dict=True,
                    **{self._cache_argument: cache},
                )
        finally:
            self._running.cache = None
        logits: Tensor = output.logits[0]
        return logits

    def run(self, step: StepInput, layout: Layout[Any], meta: Any) -> Tensor:
        """Run one packed step: logits ``[len(logit_rows), vocab]`` in the model's dtype.

        The model never sees a single row, neither in its layers nor in its head: one row takes the matrix-vector
        path, whose bits differ from those of every other row count (bf16, CPU). A lone row is padded with a dummy
        that belongs to no session.
        """
        ids, positions, rows = list(step.ids), list(step.positions), list(step.logit_rows)
        if self._switch is not None and max(positions) >= self._switch:
            raise ValueError(f"position {max(positions)} would change the rotation of all keys from {self._switch} on")
        if isinstance(layout, RecurrentLayout):
            return self._run_apart(step, layout, meta)
        if len(ids) == 1:
            ids.append(ids[0])
            positions.append(positions[0])
        padded = rows if len(rows) > 1 else [*rows, *(rows or [0]), 0][:2]
        logits = self._forward(ids, positions, padded, _StepCache(layout, meta))
        return logits[: len(rows)]

    def _run_apart(self, step: StepInput, layout: RecurrentLayout, meta: Any) -> Tensor:
        """One pass a session, which thus has no neighbours; no dummy row either: it would go through the state."""
        found = []
        for slot, carried in layout.passes(meta):
            here = slice(slot.start, slot.stop)
            rows = [row - slot.start for row in step.logit_rows if slot.start <= row < slot.stop]
            cache = _StepCache(layout, meta, carried)
            logits = self._forward(step.ids[here], step.positions[here], rows or [0], cache)
            found.append(logits[: len(rows)])
        return torch.cat(found)


def _refuse(model: PreTrainedModel, config: Any) -> None:
    name = config.model_type
    if model.config.is_encoder_decoder:
        raise Unsupported(name, "encoder-decoder models have no single KV state of the conversation")
    if getattr(model, "peft_config", None):
        raise Unsupported("an adapter (LoRA)", "merge it into the weights first")
    if _uses_alibi(model, config):
        raise Unsupported("ALiBi", f"{name} adds a distance to its attention scores")
    types = set(getattr(config, "layer_types", None) or ())
    carries = _carries(model, config)
    if carries:
        refuse_unknown_recurrence(config)
        if "position_ids" not in inspect.signature(model.forward).parameters:
            raise Unsupported("recurrent state", f"{name} has no attention beside it")
    elif not getattr(model, "_supports_attention_backend", False):
        raise Unsupported(name, "its attention does not go through transformers' attention interface")
    if types - _LAYER_TYPES:
        raise Unsupported(f"layer type {', '.join(sorted(types - _LAYER_TYPES))}", f"found in {name}")


def _carries(model: PreTrainedModel, config: Any) -> bool:
    """Whether a model says that some layers carry state beside keys and values."""
    types = set(getattr(config, "layer_types", None) or ())
    return bool(types & RECURRENT_TYPES) or (getattr(model, "_is_stateful", False) and not types <= _ATTENTION_TYPES)


def _uses_alibi(model: PreTrainedModel, config: Any) -> bool:
    """Whether scores carry linear biases (https://arxiv.org/abs/2108.12409): said by the configuration, or by code."""
    attention = getattr(config, "attn_config", None)
    declared = getattr(config, "alibi", False) or getattr(attention, "alibi", False)
    return bool(declared) or any("alibi" in name for name in dir(type(model.base_model)))


def _rope_switch(config: Any) -> int | None:
    """The context length up to which rotary frequencies stay what they are; ``None`` where nothing changes them.

    longrope (https://arxiv.org/abs/2402.13753) takes other factors for a longer context, dynamic NTK another base; both
    for all of its tokens, so that keys stored before would be wrong.
    """
    switches: list[int] = []
    for rope in _rope_parameters(config):
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "longrope":
            original = rope.get("original_max_position_embeddings")
            if not original:
                raise Unsupported("rope type 'longrope'", "its configuration does not say where it changes")
            switches.append(int(original))
        elif kind == "dynamic":
            switches.append(int(config.max_position_embeddings))
    return min(switches, default=None)


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(v, dict) for v in rope.values()):
        return [v for v in rope.values() if isinstance(v, dict)]
    return [rope] if rope else []


def _geometry(probe: _StepCache, config: Any, dtype: torch.dtype, limit: int | None) -> KVGeometry:
    """Layer groups from what the layers asked for, checked against what the configuration says."""
    calls, state, name = probe.calls, probe.carried.outcome, config.model_type
    types = getattr(config, "layer_types", None)
    if state and not calls:
        raise Unsupported("recurrent state", f"{name} has no attention beside it")
    expected = {
        layer for layer in range(int(config.num_hidden_layers)) if not types or types[layer] not in _EMPTY_TYPES
    }
    seen = {*calls, *(key.layer for key in state)}
    if seen != expected:
        missing = sorted(expected ^ seen)
        raise Unsupported(f"{name} layers {missing}", "they have no key/value attention we can see")
    declared = None if types else getattr(config, "sliding_window", None)
    groups: dict[tuple[int | None, int, int, int], list[int]] = {}
    for layer, call in sorted(calls.items()):
        if types and (types[layer] in _SLIDING_TYPES) != (call.window is not None):
            raise Unsupported(f"{name} layer {layer}", f"declared {types[layer]}, but asks for window {call.window}")
        if declared and call.window is None and (limit is None or declared < limit):
            raise Unsupported(f"{name} layer {layer}", f"its window of {declared} is in a mask only")
        groups.setdefault((call.window, call.kv_heads, call.key_dim, call.value_dim), []).append(layer)
    attention = [LayerGroup(tuple(of), window, heads, kd, vd) for (window, heads, kd, vd), of in groups.items()]
    return KVGeometry((*attention, *recurrent_groups(state, dtype.itemsize)), str(dtype).removeprefix("torch."))
