"""In float32 the engine gives transformers' own tokens and logits, alone and in any company.

Each comparison has controls: a cache with its keys reversed, or positions off by one, must not pass it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from driving import CPU, Gate, Hooked, adapted, generating, prompt, running, zero_states
from families import FAMILIES, VOCAB, Family, family
from torch import Tensor
from transformers import PreTrainedModel

from agentkv.engine.adapter import ModelAdapter, StepInput
from agentkv.kv.contract import Layout, SequenceKV
from agentkv.kv.dynamic import DynamicLayout
from agentkv.kv.packed_states import unpacked

TOLERANCE = 1e-3
"""Largest difference of a logit; their standard deviation is about 1, float32 noise here below 2e-5."""

each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
each_recurrent = pytest.mark.parametrize("family", [f for f in FAMILIES if f.states], ids=lambda f: f.name)


@dataclass
class Expected:
    """What transformers says of one prompt: greedy tokens, and the logits before each."""

    tokens: list[int]
    logits: Tensor


def by_transformers(model: PreTrainedModel, ids: Sequence[int], tokens: int) -> Expected:
    """``generate`` with its cache, checked against one forward pass over everything without any cache."""
    row = torch.tensor([list(ids)])
    output = model.generate(
        row,
        attention_mask=torch.ones_like(row),
        do_sample=False,
        max_new_tokens=tokens,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.cat(output.logits)
    whole = model(output.sequences[:, :-1], use_cache=False).logits[0, len(ids) - 1 :]
    torch.testing.assert_close(logits, whole, atol=TOLERANCE, rtol=0)
    assert logits.std() > 0.5, "logits too flat to tell anything"
    return Expected(output.sequences[0, len(ids) :].tolist(), logits)


def compare(expected: Expected, tokens: Sequence[int], rows: Sequence[Tensor]) -> None:
    """Tokens equal, logits within the tolerance, at every step."""
    assert list(tokens) == expected.tokens
    torch.testing.assert_close(torch.stack(list(rows)), expected.logits, atol=TOLERANCE, rtol=0)


def differs(expected: Expected, tokens: Sequence[int], rows: Sequence[Tensor]) -> bool:
    """Whether the logits alone give it away, well beyond the tolerance."""
    # The tokens before the damage are the same, so these rows answer the same question until they part.
    same = [a == b for a, b in zip(tokens, expected.tokens, strict=True)]
    parted = same.index(False) if False in same else len(same) - 1
    return bool((torch.stack(list(rows[: parted + 1])) - expected.logits[: parted + 1]).abs().max() > 10 * TOLERANCE)


@pytest.mark.short(9)
@each_family
async def test_alone_the_engine_equals_generate(family: Family) -> None:
    ids = prompt(45)
    expected = by_transformers(family.build(), ids, 20)
    async with running(adapted(family)) as (engine, layout):
        kv = layout.open()
        job, recorder = generating(kv, ids, 20, piece=7, resume_points=(17, 38))
        result = await engine.submit(job).finished()
    assert result is not None and result.finish_reason == "length"
    compare(expected, result.tokens, recorder.rows)
    kv.check_integrity()
    assert list(kv.ids) == ids + expected.tokens[:-1]
    assert layout.steps[:9] == [[7], [7], [3], [7], [7], [7], [7], [1], [1]]
    assert sorted(job.windows) == [17, 38]


@each_family
def test_the_layer_groups_are_those_of_the_family(family: Family) -> None:
    adapter = adapted(family)
    assert {group.window for group in adapter.geometry.attention.groups} == set(family.windows)
    recurrent = [adapter.geometry.groups[index] for index in adapter.geometry.recurrent]
    assert {state.kind for group in recurrent for state in group.states} == set(family.states)
    assert adapter.vocab_size == VOCAB
    assert adapter.context_limit == family.limit


@pytest.mark.parametrize("name", ["phi3_longrope", "llama_dynamic", "llama_yarn"])
async def test_up_to_the_last_position_of_the_context_the_engine_equals_generate(name: str) -> None:
    """One more would change the first two's frequencies, and with them all keys."""
    ids = prompt(family(name).limit - 6)
    expected = by_transformers(family(name).build(), ids, 6)
    adapter = adapted(family(name))
    async with running(adapter) as (engine, layout):
        kv = layout.open()
        job, recorder = generating(kv, ids, 6, piece=40)
        result = await engine.submit(job).finished()
    assert result is not None
    compare(expected, result.tokens, recorder.rows)


@pytest.mark.parametrize("name", ["phi3_longrope", "llama_dynamic"])
def test_no_step_goes_where_the_frequencies_change(name: str) -> None:
    """Control: transformers' own logits of the tokens before are others as soon as one more follows."""
    model, limit = family(name).build(), family(name).limit
    row = torch.tensor([prompt(limit + 1)])
    shorter, longer = model(row[:, :-1]).logits[0], model(row).logits[0, :-1]
    assert (longer - shorter).abs().max() > 10 * TOLERANCE
    adapter = adapted(family(name))
    layout = DynamicLayout(adapter.geometry, CPU)
    with pytest.raises(ValueError, match=f"position {limit} would change the rotation of all keys"):
        adapter.run(StepInput([1, 2], [0, limit], [1]), layout, layout.plan([]))


PROMPTS = (1, 2, 57, 5, 9, 14, 23, 40)
PIECES = (64, 7, 7, 3, 64, 7, 5, 16)
RESUME: tuple[tuple[int, ...], ...] = ((), (1,), (10, 20, 33), (), (9,), (5,), (11,), (0, 40))


@pytest.mark.short(9)
@each_family
async def test_eight_sessions_in_different_phases_equal_generate(family: Family) -> None:
    reference = family.build()
    async with running(adapted(family), joint_rows=20) as (engine, layout):
        gates = [Gate(), Gate()]
        jobs, recorders = [], []
        for index, (length, piece, points) in enumerate(zip(PROMPTS, PIECES, RESUME, strict=True)):
            sink = Hooked({2: gates[0], 5: gates[1]}) if index == 0 else Hooked()
            job, recorder = generating(
                layout.open(), prompt(length, index), 12, piece=piece, resume_points=points, sink=sink
            )
            jobs.append(job)
            recorders.append(recorder)
        handles = [engine.submit(job) for job in jobs[:2]]
        for gate, joining in zip(gates, (jobs[2:5], jobs[5:]), strict=True):
            await gate.reached()
            handles += [engine.submit(job) for job in joining]
            gate.open()
        results = [await handle.finished() for handle in handles]

    assert layout.mixed_steps >= 5
    assert max(len(step) for step in layout.steps) >= 6
    for job, recorder, result, ids in zip(jobs, recorders, results, map(prompt, PROMPTS, range(8)), strict=True):
        assert result is not None
        expected = by_transformers(reference, ids, 12)
        compare(expected, result.tokens, recorder.rows)
        job.kv.check_integrity()
        assert list(job.kv.ids) == ids + expected.tokens[:-1]


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.windows != (None,)], ids=lambda f: f.name)
async def test_windows_at_resume_points_are_the_keys_transformers_caches(family: Family) -> None:
    ids = prompt(45)
    async with running(adapted(family)) as (engine, layout):
        job, _ = generating(layout.open(), ids, 4, piece=7, resume_points=(5, 30))
        await engine.submit(job).finished()
    reference = family.build()
    for point in (5, 30):
        held = reference(torch.tensor([ids[:point]]), use_cache=True, return_dict=True).past_key_values.layers
        (part,) = job.windows[point]
        group = layout.geometry.groups[part.group]
        assert group.window is not None
        assert part.span == (max(0, point - group.window), point)
        kept = min(point, group.window - 1)  # transformers drops the one key that the next query cannot see
        for position, layer in enumerate(group.layers):
            for ours, theirs in (
                (part.block.keys[position], held[layer].keys[0]),
                (part.block.values[position], held[layer].values[0]),
            ):
                torch.testing.assert_close(ours[:, -kept:], theirs[:, -kept:], atol=1e-4, rtol=0)


@each_recurrent
async def test_states_at_resume_points_are_those_transformers_caches(family: Family) -> None:
    ids = prompt(45)
    async with running(adapted(family)) as (engine, layout):
        job, _ = generating(layout.open(), ids, 4, piece=7, resume_points=(1, 5, 30))
        await engine.submit(job).finished()
    reference = family.build()
    for point in (1, 5, 30):
        held = reference(torch.tensor([ids[:point]]), use_cache=True, return_dict=True).past_key_values.layers
        (part,) = job.windows[point]
        group = layout.geometry.groups[part.group]
        assert part.span == (point - 1, point)
        kinds = {"conv": "conv_states", "recurrent": "recurrent_states"}
        theirs = [getattr(held[n], kinds[s.kind])[s.number] for n in group.layers for s in group.states]
        for ours, other in zip(unpacked(group, part.block), theirs, strict=True):
            torch.testing.assert_close(ours, other, atol=1e-4, rtol=0)


def reverse_keys(kv: SequenceKV) -> None:
    for index in range(len(kv.geometry.attention.groups)):
        for run in kv.visible(index):
            for keys in kv.read(index, run).keys:
                keys.copy_(keys.flip(1))


class OffByOne(ModelAdapter):
    """Tells the model that each decoded token stands one position further on."""

    def run(self, step: StepInput, layout: Layout, meta: object) -> Tensor:
        if len(step.ids) == 1:
            step = replace(step, positions=[p + 1 for p in step.positions])
        return super().run(step, layout, meta)


async def passes(family: Family, adapter: ModelAdapter, damage: Callable[[SequenceKV], None] | None = None) -> bool:
    """Whether a lone session passes the comparison, and by a wide margin in logits where it does not."""
    ids = prompt(45)
    expected = by_transformers(family.build(), ids, 8)
    async with running(adapter) as (engine, layout):
        kv = layout.open()
        sink = Hooked({3: lambda: damage(kv)} if damage else None)
        job, recorder = generating(kv, ids, 8, piece=7, sink=sink)
        result = await engine.submit(job).finished()
    assert result is not None
    try:
        compare(expected, result.tokens, recorder.rows)
    except AssertionError:
        return not differs(expected, result.tokens, recorder.rows)
    return True


@pytest.mark.short(9)
@each_family
async def test_control_reversed_keys_do_not_pass(family: Family) -> None:
    assert not await passes(family, adapted(family), reverse_keys)


@each_recurrent
async def test_control_a_state_that_is_not_carried_does_not_pass(family: Family) -> None:
    for kind in family.states:
        assert not await passes(family, adapted(family), lambda kv, kind=kind: zero_states(kv, kind)), kind


@pytest.mark.short(9)
@pytest.mark.parametrize("family", [f for f in FAMILIES if f.learned_positions or any(f.turns)], ids=lambda f: f.name)
async def test_control_positions_off_by_one_do_not_pass(family: Family) -> None:
    assert not await passes(family, OffByOne(family.build()))


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gemma2", "gemma4", "gpt_oss", "cohere2"])
@pytest.mark.parametrize("off", [-1, 1])
async def test_control_windows_off_by_one_do_not_pass(name: str, off: int) -> None:
    adapter = adapted(family(name))
    groups = tuple(replace(g, window=g.window and g.window + off) for g in adapter.geometry.groups)
    adapter.geometry = replace(adapter.geometry, groups=groups)
    assert not await passes(family(name), adapter)


@pytest.mark.parametrize(("name", "trait"), [("gpt_oss", "sinks"), ("gemma2", "softcap")])
async def test_control_a_forgotten_trait_does_not_pass(name: str, trait: str) -> None:
    adapter = adapted(family(name))
    for module in adapter.model.modules():
        if hasattr(module, "agentkv_traits"):
            assert getattr(module.agentkv_traits, trait) is not None
            module.agentkv_traits = replace(module.agentkv_traits, **{trait: None})
    assert not await passes(family(name), adapter)
