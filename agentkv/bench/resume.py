"""First token cold, first token resumed."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from agentkv.bench.setup import machine, open_runtime, reference_of, text_ids, timed

__all__ = ["bench_resume"]

_MESSAGE = 16
"""Tokens of the message that wakes the session."""


async def bench_resume(
    tokens: int, model: str, home: Path | None, codec: str, dtype: str, threads: int | None, rounds: int = 5
) -> dict[str, Any]:
    """Medians over repetitions, cold and resumed in turn, with transformers' own prefill of the same ids beside them.

    Cold: a new session is sent history and message at once. Resumed: a session that holds the history is suspended to
    disk (files in the page cache), then sent the message. ``identical``: the resumed sessions' greedy continuations
    equal those of a session that was never suspended; lossy codecs do not promise it.
    """
    async with open_runtime(model, home, idle_codec=codec, dtype=dtype, threads=threads, idle_seconds=3600) as (
        kv,
        local,
    ):
        reference = await kv.model.engine.call(lambda: reference_of(kv, local))
        # The model's template may open every session with a default system prompt: the reference is fed it too.
        head = await (await kv.sessions.create()).token_ids()
        ids = text_ids(kv, tokens + _MESSAGE)
        history, message = ids[:tokens], ids[tokens:]
        options: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}

        warm = await kv.sessions.create()
        await warm.generate_tokens(text_ids(kv, 300, seed=1), **options)
        await kv.model.engine.call(lambda: reference.prefill([text_ids(kv, 300, seed=1)]))

        live = await kv.sessions.create()
        await live.append_tokens(history)
        expected = (await live.generate_tokens(message, **options)).ids

        cold, theirs, resumed, restores = [], [], [], []
        identical = True
        stored = raw = 0
        for _ in range(rounds):
            theirs.append(await kv.model.engine.call(lambda: timed(lambda: reference.prefill([[*head, *ids]]))))
            session = await kv.sessions.create()
            reply = await session.generate_tokens(ids, max_tokens=1, ignore_eos=True)
            cold.append(reply.ttft_seconds)
            await kv.flush()
            await session.delete()

            session = await kv.sessions.create()
            await session.append_tokens(history)
            report = await session.suspend("disk")
            stored = report.nbytes
            raw = kv.model.adapter.geometry.nbytes(report.tokens)
            reply = await session.generate_tokens(message, **options)
            identical &= reply.ids == expected and reply.restore.source == "disk"
            resumed.append(reply.ttft_seconds)
            restores.append(reply.restore.seconds)
            await kv.flush()
            await session.delete()
        return {
            "bench": "resume",
            "model": model,
            "tokens": tokens,
            "dtype": kv.model.adapter.geometry.dtype,
            "codec": codec,
            "cold_ttft_s": median(cold),
            "transformers_cold_s": median(theirs),
            "cold_over_transformers": median(a / b for a, b in zip(cold, theirs, strict=True)),
            "resumed_ttft_s": median(resumed),
            "ratio": median(a / b for a, b in zip(cold, resumed, strict=True)),
            "restore_s": median(restores),
            "bytes_raw": raw,
            "bytes_stored": stored,
            "identical": identical,
            "rounds": rounds,
            **machine(kv),
        }
