"""``agentkv doctor`` on homes whose sessions reuse what they know, and on homes whose sessions do not."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from homes import model_folder, opened, said, turns
from test_cli import agentkv

from agentkv.sessions.observed import past_of, recent_reuse
from agentkv.types import Usage


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models"))


async def lived(home: Path, model: Path, lives: int, *, losing: bool) -> tuple[int, int]:
    """A session that says three things in each of so many processes, between which its files may be lost.

    Tokens that its turns found known, and how many of them they reused, as the runtimes counted them.
    """
    name, known, reused = "", 0, 0
    for life in range(lives):
        async with opened(home, model) as kv:
            session = await (kv.sessions.get(name) if name else kv.sessions.create())
            name = session.id
            await said(session, turns(3, tokens=30, seed=life))
            await kv.sessions.create()  # another that never says anything
            stats = kv.stats()
            known, reused = known + stats.known_tokens, reused + stats.cached_tokens
        if losing:
            shutil.rmtree(home / "blobs")
    return known, reused


def doctor(home: Path, model: Path, *options: str) -> Any:
    return agentkv("doctor", "--fast", "--home", home, "--model", model, *options)


def test_doctor_warns_with_numbers_where_known_tokens_are_computed_again(tmp_path: Path, model: Path) -> None:
    home = tmp_path / "home"
    known, reused = asyncio.run(lived(home, model, 4, losing=True))
    assert 0 < reused < 0.85 * known
    done = doctor(home, model, "--json")
    report = json.loads(done.stdout)
    storage = report["storage"]
    assert (storage["known_tokens"], storage["reused_tokens"]) == (known, reused)
    assert storage["hit_rate"] == round(reused / known, 4)
    (warning,) = report["warnings"]
    assert f"the last 11 turns reused {reused:,} of {known:,} tokens" in warning["what"]
    assert f"{reused / known:.0%}; 85% and more is usual" in warning["what"]
    assert f"{known - reused:,} were computed again (missing): find out what deletes chunk files" in warning["do"]
    lost = [problem for problem in report["problems"] if "are missing from" in problem["what"]]
    assert len(lost) == len(report["problems"]) == 1, "that files are gone is a problem of its own"


def test_a_low_rate_alone_is_no_fault(tmp_path: Path, model: Path) -> None:
    home = tmp_path / "home"
    asyncio.run(lived(home, model, 3, losing=True))
    asyncio.run(kept(home, model))
    done = doctor(home, model)
    assert done.returncode == 0, done.stdout
    assert "warning: the last 9 turns reused" in done.stdout
    assert "to do:  " in done.stdout
    assert "nothing is wrong" not in done.stdout


async def kept(home: Path, model: Path) -> None:
    """What was lost is computed and stored again."""
    async with opened(home, model) as kv:
        for record in await kv.sessions.list():
            if record.ledger_length:
                await (await kv.sessions.get(record.id)).resume()
                await (await kv.sessions.get(record.id)).append_tokens([5])


def test_doctor_is_content_where_they_are_reused(tmp_path: Path, model: Path) -> None:
    home = tmp_path / "home"
    known, reused = asyncio.run(lived(home, model, 3, losing=False))
    assert reused == known > 0
    report = json.loads(doctor(home, model, "--json").stdout)
    assert (report["warnings"], report["ok"]) == ([], True)
    assert (report["storage"]["known_tokens"], report["storage"]["hit_rate"]) == (known, 1.0)
    assert "nothing is wrong" in doctor(home, model).stdout


async def test_recent_means_the_newest_turns_of_all_sessions_and_a_forks_own(tmp_path: Path, model: Path) -> None:
    home = tmp_path / "home"
    await lived(home, model, 2, losing=True)
    async with opened(home, model) as kv:
        usages: list[Usage] = []
        one, other = [await kv.sessions.create() for _ in range(2)]
        for session in (one, other, one, other, one):
            (reply,) = await said(session, turns(1, tokens=20))
            usages.append(reply.usage)
        fork = await one.fork()
        seen = await recent_reuse(kv.sessions.repository, 3)
        assert (seen.turns, seen.rate, dict(seen.computed_again)) == (3, 1.0, {})
        assert seen.reused_tokens == sum(usage.cached_tokens for usage in usages[2:])
        (reply,) = await said(fork, turns(1, tokens=20))
        assert (await recent_reuse(kv.sessions.repository, 1)).reused_tokens == reply.usage.cached_tokens
        everything = await recent_reuse(kv.sessions.repository)
        assert everything.rate is not None
        assert everything.rate < 0.85
        assert everything.turns == 5 + 3 + 1
        past = await past_of(kv.sessions.repository)
        assert past.tool_share == 0
