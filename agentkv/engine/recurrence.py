"""What recurrent layers ask of their cache, and whether what a model carries can be carried here.

transformers' linear-attention, state-space and convolution layers keep, by layer, convolution states (the last inputs
of a short convolution, ``[1, channels, kernel]``) and recurrent states (``[1, …]``). They ask for both before a step,
and store both after it; a kernel for a single token writes into what it was given instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor
from transformers import Cache
from transformers.configuration_utils import PreTrainedConfig

from agentkv.errors import Unsupported
from agentkv.kv.recurrent import Carried, StateKey
from agentkv.types import LayerGroup, StateShape

__all__ = ["RECURRENT_TYPES", "StateCache", "check_carried", "recurrent_groups", "refuse_unknown_recurrence"]

RECURRENT_TYPES = {"conv", "hybrid", "hybrid_sliding", "linear_attention", "mamba"}
"""Types of layers that may carry state, as configurations name them. The hybrid ones attend, too."""

_CALLS = ("get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state", "is_recording_past")
"""By these alone a layer's state is read and written."""


class StateCache:
    """Stands where recurrent layers expect their cache; the state is in ``carried``."""

    def __init__(self, carried: Carried) -> None:
        self.carried = carried

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.carried.get(StateKey(layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.carried.get(StateKey(layer_idx, "recurrent", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: object
    ) -> Tensor:
        """All inputs that the convolution sees; the last of them are kept. Before the first token it sees zeros."""
        key = StateKey(layer_idx, "conv", state_idx)
        before = self.carried.get(key)
        if before is None:
            kernel = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            seen = torch.nn.functional.pad(conv_states, (max(0, kernel - conv_states.shape[-1]), 0))
        else:
            kernel = before.shape[-1]
            seen = torch.cat([before, conv_states], dim=-1)
        self.carried.put(key, seen[..., -kernel:].clone())
        return seen

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> Tensor:
        return self.carried.put(StateKey(layer_idx, "recurrent", state_idx), recurrent_states)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        keys = self.carried.before
        return any(layer_idx in (None, key.layer) and state_idx in (None, key.number) for key in keys)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Never: what a layer has stored is not cropped."""
        return False


def recurrent_groups(state: Mapping[StateKey, Tensor], itemsize: int) -> Iterator[LayerGroup]:
    """Layer groups of the layers that carry ``state``; ``itemsize``: bytes of the model's numbers."""

    def of(layer: int) -> tuple[StateShape, ...]:
        keys = sorted(key for key in state if key.layer == layer)
        return tuple(
            StateShape(k.kind, k.number, tuple(state[k].shape[1:]), str(state[k].dtype).removeprefix("torch."))
            for k in keys
        )

    for states, layers in groupby(sorted({key.layer for key in state}, key=lambda n: (of(n), n)), of):
        yield LayerGroup.recurrent(tuple(layers), states, itemsize)


Pass = Callable[[Sequence[int], Carried], Tensor]
"""The model over some new tokens: their logits ``[T, vocab]``."""


def check_carried(name: str, groups: Sequence[LayerGroup], run: Pass) -> None:
    """Raise ``Unsupported`` unless a row in pieces gives what the whole row gives.

    Some layers start anew at each row that is longer than one token, whatever their cache holds. ``run`` lets no
    attention mix tokens: they reach one another through recurrent states only.
    """
    ids, first, second = [3, 1, 4, 1, 5, 9, 2, 6], slice(0, 3), slice(3, 6)
    carried, shapes = [Carried({})], None
    pieces = []
    for piece in (ids[first], ids[second], ids[6:7], ids[7:]):
        pieces.append(run(piece, carried[-1]))
        found = {key: (tensor.shape, tensor.dtype) for key, tensor in carried[-1].outcome.items()}
        if shapes not in (None, found):
            raise Unsupported("recurrent state", f"that of {name} changes its shape on the way")
        shapes = found
        carried.append(Carried(carried[-1].outcome))
    whole = run(ids, Carried({}))
    apart, anew = _distance(torch.cat(pieces), whole), _distance(run(ids[second], Carried({})), whole[second])
    rounding = 16 * torch.finfo(whole.dtype).eps * float(whole.abs().max())
    # Where float16 has no room for logits that no attention mixes, they tell nothing.
    lost = bool(whole.isfinite().all()) and not apart <= max(0.25 * anew, rounding)
    if lost or not _all_count(groups, run, ids[second], carried[1], pieces[1]):
        raise Unsupported("recurrent state", f"{name} does not take it up where a row is longer than one token")


def _all_count(groups: Sequence[LayerGroup], run: Pass, ids: Sequence[int], known: Carried, logits: Tensor) -> bool:
    """Whether each state of a group's first layer makes a difference to the logits, or to what the layer makes of it.

    A decayed state that is lost leaves logits nearly what they were.
    """
    for key in (StateKey(group.layers[0], s.kind, s.number) for group in groups for s in group.states):
        other = Carried({**known.before, key: known.before[key] + 1})
        same = torch.equal(run(ids, other), logits)
        kept = [k for k in known.outcome if k.layer == key.layer and k.kind == "recurrent"]
        if same and all(torch.equal(other.outcome[k], known.outcome[k]) for k in kept):
            return False
    return True


def refuse_unknown_recurrence(config: PreTrainedConfig) -> None:
    """Raise ``Unsupported`` where this transformers keeps recurrent state in ways that are not known here."""
    if not all(hasattr(Cache, call) for call in _CALLS):
        from transformers import __version__

        reason = f"transformers {__version__} hands it to {config.model_type} in another way: install 5.24 or later"
        raise Unsupported("recurrent state", reason)


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).abs().max())
