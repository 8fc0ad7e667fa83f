"""All benchmarks in one go: figures as JSON, pictures, and a report, in one folder."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentkv.bench.agents import bench_agents
from agentkv.bench.codecs import bench_codecs
from agentkv.bench.decode import bench_decode
from agentkv.bench.growth import bench_growth
from agentkv.bench.http import bench_http
from agentkv.bench.pictures import draw_all
from agentkv.bench.report import written_report
from agentkv.bench.resume import bench_resume
from agentkv.bench.stream import bench_stream
from agentkv.bench.traffic import Traffic
from agentkv.cli.plot import check_plotting
from agentkv.errors import InvalidRequest

__all__ = ["Suite", "run_suite"]

_QUICK = Traffic(sessions=12, turns=3, kinds=2, compression=100)


@dataclass(frozen=True, slots=True)
class Suite:
    """What is measured. ``against``: URL, model and key of a server that is given the agents' traffic as well.
    ``traffic``: what the agents do; ``None``: what fits ``quick``."""

    model: str
    home: Path | None
    dtype: str
    threads: int | None
    quick: bool
    against: tuple[str, str | None, str | None] | None = None
    traffic: Traffic | None = None

    def parts(self) -> dict[str, Callable[[], Awaitable[dict[str, Any]]]]:
        """Each benchmark by its name, in the order in which they run."""
        model, home, dtype, threads, quick = self.model, self.home, self.dtype, self.threads, self.quick
        traffic, budget = (self.traffic or _QUICK, 2.0) if quick else (self.traffic or Traffic(), 4.0)
        window = 512 if quick else 1024
        policies = ("full", f"sink:{window}", f"turns:{window}", f"sliding:{window}")

        async def resume() -> dict[str, Any]:
            lengths = (256, 768, 2048) if quick else (512, 1024, 2048, 4096, 7168)
            rounds = 2 if quick else 5
            return {
                "bench": "resume",
                "lengths": [await bench_resume(n, model, home, "exact", dtype, threads, rounds) for n in lengths],
            }

        async def agents() -> dict[str, Any]:
            return await bench_agents(
                traffic, None, budget, model, home, servers="both", against=self.against, dtype=dtype, threads=threads
            )

        async def residency() -> dict[str, Any]:
            return await bench_agents(traffic, None, budget, model, home, residency="all", dtype=dtype, threads=threads)

        return {
            "resume": resume,
            "decode": lambda: bench_decode(8, 256 if quick else 1024, model, home, dtype, threads, quick),
            "growth": lambda: bench_growth(policies, 4096 if quick else 32_768, model, home, dtype, threads),
            "stream": lambda: bench_stream(
                f"sink:{window}", 3072 if quick else 50_000, model, home, dtype, threads, quick
            ),
            "agents": agents,
            "residency": residency,
            "codecs": lambda: bench_codecs(
                1536 if quick else None, 256 if quick else None, model, home, dtype, threads
            ),
            "http": lambda: bench_http(4 if quick else 20, 16 if quick else 48, 2, model, home, dtype, threads, quick),
        }


async def run_suite(suite: Suite, out: Path, *, say: Callable[[str], None] = lambda line: None) -> list[str]:
    """Run every part, and write ``<part>.json`` as each ends, then the pictures and ``report.md``.

    Returns the names of parts that failed; their file has the error, and the others are not concerned. Raises
    ``InvalidRequest`` before anything runs where pictures cannot be drawn or ``out`` cannot be written.
    """
    try:
        await asyncio.to_thread(out.mkdir, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(f"--out cannot be made a folder: {error}", param="out") from error
    check_plotting(out / "any.png", "--out")
    results: dict[str, dict[str, Any]] = {}
    parts = suite.parts()
    for number, (name, work) in enumerate(parts.items(), 1):
        say(f"{number}/{len(parts)} {name} …")
        started = time.perf_counter()
        try:
            result = await work()
        except Exception as error:  # the other parts are measured all the same
            say(f"{name} failed: {type(error).__name__}: {error}")
            result = {"bench": name, "error": f"{type(error).__name__}: {error}"}
        result["seconds"] = round(time.perf_counter() - started, 1)
        results[name] = result
        text = json.dumps(result, indent=1)
        await asyncio.to_thread((out / f"{name}.json").write_text, text, "utf-8")
    good = {name: result for name, result in results.items() if "error" not in result}
    pictures = await asyncio.to_thread(draw_all, good, out)
    await asyncio.to_thread((out / "report.md").write_text, written_report(results, pictures, suite.quick), "utf-8")
    return [name for name in results if name not in good]
