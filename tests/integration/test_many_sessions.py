"""Two thousand sessions asleep on disk: opening their home, and waking any of them, takes what it takes with ten.

Every session is a real one, which computed its own ledger and wrote its own eight chunk files. What makes that quick:
a model of one layer, one append of 2,048 tokens a session in one prefill piece, sixteen sessions at a time, and no
fsync while the homes are being prepared (durability is not what is measured here).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from families import family
from homes import opened

MANY, FEW = 2_000, 10
TOKENS, CHUNKS = 2_048, 8
WOKEN = 60

MEASURED = """
import asyncio, json, random, sys, time
from pathlib import Path
from homes import opened
from agentkv.sessions import runtime

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

model = {}
load = runtime._load_model

def timed(settings):
    began = time.perf_counter()
    loaded = load(settings)
    model.update(seconds=time.perf_counter() - began, resident=resident())
    return loaded

runtime._load_model = timed

async def main():
    home, folder, woken = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    await asyncio.to_thread(runtime._import_engine)
    began = time.perf_counter()
    async with opened(home, folder) as kv:
        opening = time.perf_counter() - began - model["seconds"]
        above = resident() - model["resident"]
        names, before = [], None
        while page := await kv.sessions.list(limit=500, before=before):
            names += [record.id for record in page]
            before = page[-1].id
        files = sum(1 for _ in kv.sessions.tiers.blobs.list())
        seconds = []
        draw = random.Random(0)
        for _ in range(woken):
            session = await kv.sessions.get(draw.choice(names))
            began = time.perf_counter()
            report = await session.resume()
            seconds.append(time.perf_counter() - began)
            assert (report.source, report.reason) == ("disk", None), report
            await session.suspend()
        print(json.dumps([opening, above, len(names), files, report.tokens, seconds]))

asyncio.run(main())
"""


@dataclass(frozen=True)
class Found:
    """``seconds`` of opening without the model, ``resident`` bytes above it; each of ``resumes`` in seconds."""

    seconds: float
    resident: int
    sessions: int
    files: int
    tokens: int
    resumes: list[float]

    @property
    def resume(self) -> float:
        return statistics.median(self.resumes)


def small_model(folder: Path) -> Path:
    member = family("llama")
    config = member.config()
    config.num_hidden_layers, config.hidden_size = 1, 16
    config.num_attention_heads, config.num_key_value_heads = 2, 1
    config.max_position_embeddings = TOKENS + 256
    replace(member, config=lambda: config).build(0).save_pretrained(folder)
    return folder


async def populate(home: Path, model: Path, sessions: int) -> None:
    draw, at_once = random.Random(sessions), asyncio.Semaphore(16)
    async with opened(home, model, prefill_tokens=TOKENS) as kv:

        async def one() -> None:
            async with at_once:
                session = await kv.sessions.create()
                await session.append_tokens([draw.randrange(1, 131) for _ in range(TOKENS)])
                assert (await session.suspend()).chunks_written in (0, CHUNKS)

        await asyncio.gather(*(one() for _ in range(sessions)))


def measured(home: Path, model: Path) -> Found:
    tests = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(home), str(model), str(WOKEN)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": f"{tests}:{tests.parent}", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return Found(*json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_two_thousand_sessions_on_disk_open_and_wake_like_ten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(tmp_path / "model")
    with monkeypatch.context() as quick:
        quick.setattr(os, "fsync", lambda descriptor: None)
        asyncio.run(populate(tmp_path / "few", model, FEW))
        asyncio.run(populate(tmp_path / "many", model, MANY))
    # Each twice, in turn, and the better one counts: others use this machine.
    runs = [(measured(tmp_path / "few", model), measured(tmp_path / "many", model)) for _ in range(2)]
    few = min((pair[0] for pair in runs), key=lambda found: found.resume)
    many = min((pair[1] for pair in runs), key=lambda found: found.resume)
    opening = min(pair[1].seconds for pair in runs)
    for name, found in (("few", few), ("many", many)):
        print(
            f"{name}: {found.sessions} sessions, {found.files} files: opened in {found.seconds:.2f} s and "
            f"{found.resident / 2**20:.1f} MiB above the model; {found.tokens} tokens resumed in "
            f"{1e3 * found.resume:.1f} ms (median of {len(found.resumes)}, longest {1e3 * max(found.resumes):.1f})"
        )
    assert (few.sessions, few.files) == (FEW, FEW * CHUNKS)
    assert (many.sessions, many.files) == (MANY, MANY * CHUNKS)
    assert many.tokens == few.tokens == TOKENS - 1
    assert opening < 2.0
    assert many.resident < 300 * 10**6
    assert many.resume < 2.0 * few.resume + 0.005
