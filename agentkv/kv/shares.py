"""What a layout that wraps another one needs of the inner one's plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from agentkv.kv.attention import Reach

__all__ = ["Gathers", "Share"]


class _GroupShare(Protocol):
    @property
    def reach(self) -> Reach: ...


class Share(Protocol):
    """One slot's part of the inner layout's plan."""

    @property
    def start(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def groups(self) -> Sequence[_GroupShare]: ...


class Gathers(Protocol):
    """What a layout needs to be wrapped: its plan is a list of shares, whose older tokens it copies out.

    ``offloaded`` calls it from the fetching thread, while the model thread writes new tokens of the layer before.
    """

    def gather(self, layer: int, slot: Share, keys: Tensor, values: Tensor) -> None: ...
