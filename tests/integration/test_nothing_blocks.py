"""A call that blocks the event loop inside ``agentkv`` fails the test that it happens in, also where it is caught."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from blockbuster import BlockingError

import agentkv
from agentkv.api.scratch import cleared

CODE = """
async def waits(path):
    return path.stat()
"""


async def test_a_blocking_call_inside_agentkv_is_an_error(tmp_path: Path, unblocked: list[str]) -> None:
    found: dict[str, Any] = {}
    exec(compile(CODE, str(Path(agentkv.__file__).with_name("made_up.py")), "exec"), found)
    with pytest.raises(BlockingError):
        await found["waits"](tmp_path)
    assert len(unblocked) == 1 and "in waits" in unblocked[0]
    unblocked.clear()
    cleared(tmp_path)  # a plain function blocks whoever calls it
    assert not unblocked
