"""What each codec costs and saves, as ``agentkv calibrate`` measures it; nothing is kept."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from agentkv.engine.calibration import calibrate
from agentkv.engine.loading import load
from agentkv.models import pull
from agentkv.models.gate import Calibration
from agentkv.settings import Settings

__all__ = ["bench_codecs"]


async def bench_codecs(
    prefix: int | None, scored: int | None, model: str, home: Path | None, dtype: str, threads: int | None
) -> dict[str, Any]:
    """``prefix`` tokens stored and restored through each codec, the next ``scored`` teacher-forced; ``None``: as many
    as ``agentkv calibrate`` takes. The figures are those of its report."""
    given: dict[str, Any] = {} if home is None else {"home": home}
    settings = Settings(**given, model=model, dtype=dtype, threads=threads, layout="auto")

    def measure() -> Calibration:
        return calibrate(load(pull(model, settings), settings), prefix=prefix, scored=scored).report

    report = await asyncio.to_thread(measure)
    return {"bench": "codecs", **report.model_dump(mode="json")}
