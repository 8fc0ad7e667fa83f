"""A call that blocks the event loop inside ``agentkv`` fails the test that it happens in, also where it is caught."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from blockbuster import BlockingError

from agentkv.api.scratch import cleared


async def test_a_blocking_call_inside_agentkv_is_an_error(tmp_path: Path, unblocked: list[str]) -> None:
    (tmp_path / "transfers").mkdir()
    with pytest.raises(BlockingError):
        cleared(tmp_path)
    assert len(unblocked) == 1 and "in cleared" in unblocked[0]
    await asyncio.to_thread(cleared, tmp_path)
    unblocked.clear()
