"""The conformance suite of KV layouts: a state machine that any layout, whoever wrote it, must pass.

    TestMyLayout = layout_machine(MyLayout).TestCase

Needs hypothesis (``pip install hypothesis``; the extra ``agentkv[dev]`` has it).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from agentkv.kv.contract import Layout
from agentkv.testing.naive import GEOMETRY, QUERY_HEADS, NaiveKV, same_block
from agentkv.types import KVGeometry

if TYPE_CHECKING:
    from hypothesis.stateful import RuleBasedStateMachine

__all__ = ["GEOMETRY", "QUERY_HEADS", "MakeLayout", "NaiveKV", "layout_machine", "same_block"]

MakeLayout = Callable[[KVGeometry, torch.device], Layout[Any]]


def layout_machine(make_layout: MakeLayout) -> type[RuleBasedStateMachine]:
    """A hypothesis state machine that drives layouts made by ``make_layout`` and compares them with ``NaiveKV``.

    Attention must agree within float32's rounding, KV that is read, captured or restored bit for bit. A layout may hold
    tokens with loss, which its states name as ``lossy``: they must be within what ``bound(group, span)`` of the state
    says (a ``KVBlock`` of float64: how far each number that ``read`` gives may be off), and then stay what they are.
    """
    try:
        from agentkv.testing.machine import LayoutMachine
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise ModuleNotFoundError(
            "agentkv.testing.layouts needs hypothesis: pip install 'agentkv[dev]'", name="hypothesis"
        ) from error
    return type("LayoutMachine", (LayoutMachine,), {"make_layout": staticmethod(make_layout)})
