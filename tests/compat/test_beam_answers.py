"""Beam search against transformers' own, in float32 on weights that make a difference."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import check_session, model_folder, opened, prompt, said
from transformers import AutoModelForCausalLM

from agentkv.errors import CapacityExceeded, InvalidRequest, Unsupported


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def reference(theirs: Any, ids: list[int], tokens: int, end: int | None, **options: Any) -> list[int]:
    """What ``generate`` adds to ``ids``."""
    theirs.generation_config.eos_token_id = end
    theirs.generation_config.pad_token_id = 0
    found = theirs.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False, **options)[0].tolist()[
        len(ids) :
    ]
    return found[: found.index(end) + 1] if end in found else found


@pytest.mark.short(2)
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", "dynamic"),
        ("llama", "paged"),
        ("gemma3", "dynamic"),
        ("gpt_neox", "static"),
        ("falcon_h1", "dynamic"),
    ],
)
async def test_the_answer_is_transformers_answer(tmp_path: Path, models: Path, family: str, layout: str) -> None:
    model = model_folder(models, family)
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    async with opened(tmp_path, model, layout=layout) as kv:
        vocab = kv.model.adapter.vocab_size
        differ = 0
        for seed in range(2):
            ids = prompt(50, seed)
            plain = reference(theirs, ids, 8, None)
            for end in (None, plain[3], int(vocab // 2)):
                object.__setattr__(kv.model, "end_ids", frozenset() if end is None else frozenset([end]))
                for options in (
                    {},
                    {"length_penalty": 0.0},
                    {"early_stopping": True},
                    {"early_stopping": "never", "length_penalty": 2.0},
                ):
                    expected = reference(theirs, ids, 8, end, num_beams=4, **options)
                    session = await kv.sessions.create()
                    reply = await session.generate_tokens(ids, max_tokens=8, beams=4, **options)
                    assert list(reply.ids) == expected, (seed, end, options)
                    assert reply.finish_reason == ("stop" if expected[-1] == end else "length")
                    differ += expected != plain
                    await check_session(kv, session)
                    await session.delete()
        assert differ, "no beam search found anything but the greedy answer: this test sees nothing"


async def test_a_session_goes_on_after_a_search_as_after_any_turn(tmp_path: Path, models: Path) -> None:
    model = model_folder(models, "gemma3")
    async with opened(tmp_path, model) as kv:
        session, twin = await kv.sessions.create(), await kv.sessions.create()
        answer = await session.generate_tokens(prompt(70), max_tokens=9, beams=3)
        await twin.append_tokens([*prompt(70), *answer.ids])
        await session.suspend("disk")
        following = [(await said(each, [prompt(20, 4)], 8))[0].ids for each in (session, twin)]
        assert following[0] == following[1]
        assert await session.token_ids() == await twin.token_ids()
        await check_session(kv, session)


async def test_a_search_that_is_cancelled_or_does_not_fit_never_was(tmp_path: Path, models: Path) -> None:
    async with opened(tmp_path, model_folder(models, "gemma3")) as kv:
        session = await kv.sessions.create()
        await said(session, [prompt(60)], 6)
        ledger, reserved = await session.token_ids(), kv.sessions.tiers.device_bytes
        for wait in (0.0, 0.02, 0.1, 0.3):
            task = asyncio.create_task(session.generate_tokens(prompt(30), max_tokens=400, beams=4))
            await asyncio.sleep(wait)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            assert await session.token_ids() == ledger
            await check_session(kv, session)
            assert kv.sessions.tiers.device_bytes <= 2 * reserved
        kv.sessions.tiers.device_budget = kv.sessions.tiers.device_bytes * 3
        with pytest.raises(CapacityExceeded, match="beams"):
            await session.generate_tokens(prompt(30), max_tokens=400, beams=16)
        kv.sessions.tiers.device_budget = 2**32
        twin = await kv.sessions.create()
        await said(twin, [prompt(60)], 6)
        following = [(await said(each, [prompt(20, 4)], 8))[0].ids for each in (session, twin)]
        assert following[0] == following[1]


async def test_what_does_not_go_with_beams_is_refused_by_name(tmp_path: Path, models: Path) -> None:
    async with opened(tmp_path, model_folder(models)) as kv:
        session = await kv.sessions.create(policy="sink:64,sinks=4")
        with pytest.raises(Unsupported, match="beams=2"):
            await session.generate_tokens(prompt(5), beams=2)
        for wrong in ({"temperature": 1.0}, {"top_k": 3}, {"logprobs": 2}):
            with pytest.raises(InvalidRequest, match="beam search"):
                await session.generate_tokens(prompt(5), beams=2, **wrong)
