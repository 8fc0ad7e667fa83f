"""Sampling is transformers' own, with a generator of the request's own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from driving import CPU, adapted, generating, prompt, running
from families import VOCAB, family
from torch import Tensor
from transformers import GenerationConfig

from agentkv.engine.sampling import Sampler, choose, likeliest
from agentkv.schemas.sampling import SamplingParams

HISTORY = prompt(30)

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.5, "min_p": 0.1},
    {"temperature": 0.8, "repetition_penalty": 1.4},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
    {"repetition_penalty": 1.6},
    {"temperature": 0.0, "repetition_penalty": 1.6},
    {"temperature": 1.0, "top_k": 10_000},
]


def logits(seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def sampler(**settings: Any) -> Sampler:
    return Sampler(SamplingParams.build(**settings), CPU)


def scores_by_transformers(row: Tensor, settings: dict[str, Any]) -> Tensor:
    """The row after the processors that ``generate`` itself builds from these settings, in its own order."""
    if settings.get("temperature"):
        config = GenerationConfig(**{"top_k": 0, **settings}, do_sample=True)
    else:
        config = GenerationConfig(repetition_penalty=settings.get("repetition_penalty"))
    processors = family("llama").build()._get_logits_processor(config, input_ids_seq_length=len(HISTORY))
    return processors(torch.tensor([HISTORY]), row[None].clone())[0]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_choices_are_those_of_transformers_processors(settings: dict[str, Any]) -> None:
    ours = sampler(**settings, seed=5)
    generator = torch.Generator().manual_seed(5)
    for step in range(6):
        row = logits(step)
        scores = scores_by_transformers(row, settings)
        if settings.get("temperature"):
            expected = int(torch.multinomial(torch.softmax(scores, -1), 1, generator=generator))
        else:
            expected = int(scores.argmax())
        before = row.clone()
        assert ours.sample(row, HISTORY) == expected
        assert torch.equal(row, before), "the logits are the caller's"


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"temperature": 0.0, "seed": 3, "top_k": 2}])
def test_without_a_temperature_the_likeliest_token_is_taken(settings: dict[str, Any]) -> None:
    ours = sampler(**settings)
    assert ours.plain
    assert ours.seed is None
    assert ours.sample(logits(), HISTORY) == int(logits().argmax())


def test_the_same_seed_gives_the_same_choices_and_another_seed_others() -> None:
    def draw(seed: int) -> list[int]:
        ours = sampler(temperature=1.0, seed=seed)
        return [ours.sample(logits(step, 1.0), HISTORY) for step in range(30)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63, 2**64 - 1])
def test_every_seed_that_is_accepted_works(seed: int) -> None:
    ours = sampler(temperature=1.0, seed=seed)
    assert ours.seed == seed
    assert 0 <= ours.sample(logits(), HISTORY) < VOCAB


def test_without_a_seed_one_is_drawn_and_told() -> None:
    first, second = sampler(temperature=1.0), sampler(temperature=1.0)
    assert first.seed is not None and first.seed != second.seed
    again = sampler(temperature=1.0, seed=first.seed)
    assert [first.sample(logits(s), HISTORY) for s in range(9)] == [again.sample(logits(s), HISTORY) for s in range(9)]


def test_draws_follow_the_distribution() -> None:
    row = torch.log(torch.tensor([0.5, 0.3, 0.2]))
    ours = sampler(temperature=1.0, seed=0)
    counts = torch.bincount(torch.tensor([ours.sample(row, [0]) for _ in range(4000)]), minlength=3)
    # Three standard deviations of a share over 4000 draws are at most 0.024.
    assert torch.allclose(counts / 4000, row.exp(), atol=0.024)


def test_logprobs_are_those_of_the_unmodified_distribution() -> None:
    ours = sampler(temperature=0.5, top_k=1, repetition_penalty=2.0, logprobs=3)
    row = logits()
    truth = torch.log_softmax(row, -1)
    found = ours.logprob(row, 17)
    assert found is not None
    assert math.isclose(found.logprob, float(truth[17]), abs_tol=1e-6)
    assert [token for token, _ in found.top] == truth.topk(3).indices.tolist()
    assert [value for _, value in found.top] == pytest.approx(truth.topk(3).values.tolist())


def test_logprobs_without_alternatives_and_without_being_asked() -> None:
    none_wanted = sampler(logprobs=0).logprob(logits(), 4)
    assert none_wanted is not None and none_wanted.top == ()
    assert sampler().logprob(logits(), 4) is None


def test_a_batch_chooses_row_by_row() -> None:
    rows = torch.stack([logits(s) for s in range(4)])
    settings = [{}, {"temperature": 1.0, "seed": 3}, {"repetition_penalty": 3.0}, {"temperature": 0.6, "seed": 4}]
    histories = [prompt(20, s) for s in range(4)]
    likely = likeliest(rows)
    assert likely == [int(row.argmax()) for row in rows]
    together = [
        choose(*each, h) for *each, h in zip(rows, likely, [sampler(**s) for s in settings], histories, strict=True)
    ]
    alone = [sampler(**s).sample(row, h) for s, row, h in zip(settings, rows, histories, strict=True)]
    assert [token for token, _ in together] == alone


def test_half_precision_logits_are_widened_first() -> None:
    row = logits().bfloat16()
    assert sampler(temperature=1.0, seed=1).sample(row, HISTORY) == sampler(temperature=1.0, seed=1).sample(
        row.float(), HISTORY
    )


async def test_the_same_seed_gives_the_same_tokens_alone_and_in_a_batch() -> None:
    adapter = adapted(family("gemma3"))
    settings = [
        {"temperature": 1.0, "seed": 11},
        {"temperature": 1.0, "seed": 12},
        {"temperature": 0.9, "top_p": 0.9, "seed": 11},
        {"temperature": 0.9, "repetition_penalty": 1.3, "seed": 13},
        {},
    ]

    async with running(adapter) as (engine, layout):

        async def run(*indices: int) -> list[tuple[int, ...]]:
            jobs = [generating(layout.open(), prompt(20 + i), 16, piece=7, **settings[i])[0] for i in indices]
            results = [await handle.finished() for handle in [engine.submit(each) for each in jobs]]
            assert all(results)
            return [result.tokens for result in results if result is not None]

        alone = [(await run(index))[0] for index in range(5)]
        assert await run(0, 1, 2, 3, 4) == alone
        assert await run(4, 2, 0) == [alone[4], alone[2], alone[0]]
    assert len(set(alone)) == 5
