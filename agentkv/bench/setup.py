"""What every benchmark needs: a runtime on a temporary home, the reference model, text, a name for the machine."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from agentkv.engine.machine import machine as describe
from agentkv.engine.reference import load_reference
from agentkv.engine.texts import documentation, encoded
from agentkv.errors import InvalidRequest
from agentkv.models import LocalModel, pull
from agentkv.sessions.runtime import AgentKV
from agentkv.settings import Settings

__all__ = ["documentation_ids", "machine", "open_runtime", "reference_of", "text_ids", "timed"]


@asynccontextmanager
async def open_runtime(model: str, home: Path | None, **settings: Any) -> AsyncIterator[tuple[AgentKV, LocalModel]]:
    """A runtime whose sessions live in a temporary folder, bit for bit unless told otherwise.

    Models and their calibrations are the user's.
    """
    settings.setdefault("idle_codec", "exact")
    settings_of_user = Settings() if home is None else Settings(home=home)
    local = await asyncio.to_thread(pull, model, settings_of_user)
    with tempfile.TemporaryDirectory(prefix="agentkv-bench-") as folder:
        if (known := settings_of_user.home / "calibration").is_dir():
            await asyncio.to_thread(shutil.copytree, known, Path(folder) / "calibration")
        async with AgentKV.open(model=str(local.path), home=Path(folder), **settings) as kv:
            yield kv, local


def reference_of(kv: AgentKV, local: LocalModel) -> Any:
    """transformers' own model on the same weights, dtype and device."""
    adapter = kv.model.adapter
    return load_reference(local.path, adapter.model.dtype, adapter.device)


def text_ids(kv: AgentKV, tokens: int, seed: int = 0) -> list[int]:
    """``tokens`` ids of running text: the shipped document, started at a seeded place and repeated as needed."""
    file = Path(__file__).parent.parent / "cli" / "data"
    text = "\n".join(p.read_text() for p in sorted(file.glob("*.txt")))
    tokenizer = kv.model.tokenizer
    if tokenizer is None:
        raise InvalidRequest(f"{kv.model.name} has no tokenizer: benchmarks feed it text", param="model")
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    start = random.Random(seed).randrange(len(ids))
    while len(ids) < start + tokens:
        ids = ids + ids
    return ids[start : start + tokens]


def documentation_ids(kv: AgentKV, tokens: int) -> list[int]:
    """``tokens`` ids of long real text that every Python has: its own documentation."""
    return encoded(documentation(), kv.model.tokenizer, tokens)


def timed(work: Callable[[], Any]) -> float:
    """Seconds that ``work`` takes, the device's queue included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def machine(kv: AgentKV) -> dict[str, Any]:
    """What the figures were measured on."""
    return describe(kv.model.adapter.device)
