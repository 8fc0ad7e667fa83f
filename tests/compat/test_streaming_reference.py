"""Under retention policies the engine computes what StreamingLLM does: a float64 reference, cache-relative positions.

Compared at every generated token, on the engine's own tokens. In float32 the largest difference of a logit (they have
a standard deviation of about 1) must be below ``TOLERANCE``. In bf16 it must stay within what the same model differs
where nothing is evicted. Controls show that each wrong treatment of keys is far outside of both.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from driving import CPU, generating, prompt
from families import FAMILIES, Family, family
from homes import chat_folder, model_folder, opened
from streaming import InFloat64, StreamingReference, by_policy, everything, streaming_llm, weights_in
from torch import Tensor
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

import agentkv.kv.buffers
from agentkv.engine.adapter import ModelAdapter, StepInput
from agentkv.engine.engine import Engine
from agentkv.engine.job import Job
from agentkv.engine.retention import Retention
from agentkv.kv.contract import LAYOUTS, Layout, SequenceKV
from agentkv.kv.placed import PlacedKV
from agentkv.policies.retention import (
    Full,
    ItemView,
    RetentionPolicy,
    SinkWindow,
    SlidingWindow,
    TurnWindow,
    parse_policy,
    policy_text,
)
from agentkv.rope import Rotation, rotate
from agentkv.schemas.replies import Reply
from agentkv.sessions.session import Session
from agentkv.types import Placement, Span

TOLERANCE = 1e-4
"""Of a logit or a logarithm of a probability in float32; the noise here is below 3e-5."""

NAMES = ("llama", "qwen2", "qwen3", "phi3", "llama_yarn", "llama_llama3", "gpt_neox", "glm", "gemma3", "smollm3")
ROUTED = ("gpt_oss", "qwen3_moe")
"""Where a bit differs their routers take another expert: no noise of bf16 to measure."""
FROZEN = ("phi3_longrope", "llama_dynamic")
"""Whose frequencies stay what they are up to a position only."""
MOVABLE = [f for f in FAMILIES if f.movable and f.name not in FROZEN]


def _each(*now: str, leave_out: Sequence[str] = ()) -> list[Any]:
    """All families that can evict, those not named here in full runs only."""
    return [
        pytest.param(f, id=f.name, marks=[] if f.name in now else pytest.mark.full)
        for f in MOVABLE
        if f.name not in leave_out
    ]


each_layout = pytest.mark.parametrize("layout", list(LAYOUTS))

WINDOW, SLACK, PINNED, PROMPT, TOKENS = 40, 6, 11, 130, 50


# -- the sessions that are compared -----------------------------------------------------------------------------------


def _items() -> tuple[ItemView, ...]:
    """System, then turns of a question, a call and its result; the last item is still growing."""
    sizes = {"message": 7, "tool_call": 3, "tool_result": 9}
    items, at = [ItemView(Span(0, PINNED), "system", "message", 0)], PINNED
    for turn in range(1, 30):
        for kind, size in sizes.items():
            items.append(ItemView(Span(at, at + size), "any", kind, turn))
            at += size
    return tuple(items)


ITEMS = _items()
TURNS = TurnWindow(64, keep_last_turns=1, slack=8)


@dataclass(frozen=True)
class Case:
    """A policy at work on a prompt longer than its window, and what each of ``length`` tokens should find held."""

    policy: RetentionPolicy
    held: Callable[[int], list[list[int]]]

    @property
    def retention(self) -> Retention:
        return Retention(self.policy, Span(0, PINNED), ITEMS)

    def __str__(self) -> str:
        return policy_text(self.policy)


SINK = Case(SinkWindow(WINDOW, slack=SLACK), lambda n: streaming_llm(n, WINDOW, SLACK, PINNED))
CASES = (
    SINK,
    Case(SinkWindow(WINDOW, sinks=5, slack=SLACK), lambda n: streaming_llm(n, WINDOW, SLACK, 5)),
    Case(SlidingWindow(WINDOW, slack=SLACK), lambda n: streaming_llm(n, WINDOW, SLACK, 0)),
    Case(TURNS, lambda n: by_policy(n, TURNS, PINNED, ITEMS)),
)
NOT_EVICTING = tuple(Case(Full(), everything) for _ in CASES)


@dataclass
class Run:
    """What the engine did: the ledger it computed, the tokens it chose, the logits it chose them from."""

    ledger: list[int]
    tokens: list[int]
    logits: Tensor
    kv: SequenceKV

    def compared_with(self, reference: Tensor) -> Tensor:
        """Differences of the logits to those of a reference that was fed the whole ledger."""
        return self.logits.double() - reference[-len(self.tokens) :]


@asynccontextmanager
async def working(adapter: ModelAdapter, name: str, rebase_at: int | None = None) -> AsyncIterator[Engine]:
    layout = LAYOUTS.get(name)(adapter.geometry, CPU)
    if rebase_at is not None:
        layout.rebase_at = rebase_at
    engine = Engine(adapter, layout, joint_rows=64)
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def finished(engine: Engine, works: Sequence[tuple[Job, Any]]) -> list[Run]:
    """The jobs' runs, side by side in the engine."""
    handles = [engine.submit(job) for job, _ in works]
    runs = []
    for handle, (job, recorder) in zip(handles, works, strict=True):
        result = await handle.finished()
        assert result is not None
        job.kv.check_integrity()
        runs.append(Run(list(job.kv.ids), list(result.tokens), torch.stack(recorder.rows), job.kv))
    return runs


async def runs_of(
    adapter: ModelAdapter,
    cases: Sequence[Case] = CASES,
    layout: str = "dynamic",
    *,
    rebase_at: int | None = None,
) -> list[Run]:
    """Each case's prompt in one append, then ``TOKENS`` tokens."""
    async with working(adapter, layout, rebase_at) as engine:
        works = []
        for seed, case in enumerate(cases):
            kv = engine.layout.open(0, PROMPT + TOKENS)
            job, recorder = generating(kv, prompt(PROMPT, seed), TOKENS)
            job.retention = case.retention
            works.append((job, recorder))
        return await finished(engine, works)


def adapted(family: Family, dtype: torch.dtype = torch.float32) -> ModelAdapter:
    return ModelAdapter(weights_in(family.build(), dtype))


class ExactAdapter(ModelAdapter):
    """All of the model in float64, its angles too."""

    def run(self, step: StepInput, layout: Layout[Any], meta: Any) -> Tensor:
        with InFloat64():
            return super().run(step, layout, meta)


def in_float64(name: str) -> ModelAdapter:
    return ExactAdapter(weights_in(family(name).build(), torch.float64))


def expect(run: Run, reference: Tensor, tolerance: float = TOLERANCE) -> None:
    """Logits within the tolerance at each token, and the reference's greedy token is the one that was chosen."""
    assert float(run.compared_with(reference).abs().max()) < tolerance
    assert reference[-len(run.tokens) :].argmax(-1).tolist() == run.tokens


# -- the reference itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*MOVABLE, *map(family, FROZEN)], ids=lambda f: f.name)
def test_where_nothing_is_evicted_the_reference_is_transformers_in_float64(family: Family) -> None:
    ids = prompt(30)
    model = weights_in(family.build(), torch.float64)
    model.config._experts_implementation = "eager"
    with torch.no_grad(), InFloat64():
        expected = model(torch.tensor([ids]), use_cache=False).logits[0]
    assert expected.dtype == torch.float64
    at_once = StreamingReference(family).feed(ids, everything(30))
    one_by_one = StreamingReference(family).feed(ids, everything(30), most=1)
    torch.testing.assert_close(at_once, expected, atol=1e-10, rtol=0)
    torch.testing.assert_close(one_by_one, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("case", [SINK, CASES[-1]], ids=str)
def test_the_reference_is_the_same_token_by_token(case: Case) -> None:
    ids, held = prompt(90), case.held(90)
    at_once = StreamingReference(family("gemma3")).feed(ids, held)
    one_by_one = StreamingReference(family("gemma3")).feed(ids, held, most=1)
    torch.testing.assert_close(at_once, one_by_one, atol=1e-10, rtol=0)


@pytest.mark.parametrize("window, slack, sinks", [(40, 6, 11), (33, 1, 4), (16, 8, 0), (64, 20, 24)])
def test_policies_and_the_naive_windows_hold_the_same(window: int, slack: int, sinks: int) -> None:
    policy = SinkWindow(window, sinks=sinks, slack=slack) if sinks else SlidingWindow(window, slack=slack)
    assert by_policy(300, policy) == streaming_llm(300, window, slack, sinks)


def test_turns_leave_gaps_in_the_middle() -> None:
    """So that the cases have what they are for."""
    held = CASES[-1].held(PROMPT + TOKENS)
    gaps = [sum(b > a + 1 for a, b in pairwise(indices)) for indices in held]
    assert max(gaps) >= 2
    for case in CASES:
        evictions = sum(len(b) <= len(a) for a, b in pairwise(case.held(PROMPT + TOKENS)))
        assert evictions >= (5 if case.policy is TURNS else 20), (case, evictions)


# -- the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.short(5)
@pytest.mark.parametrize("family", _each(*NAMES))
async def test_under_every_policy_the_engine_equals_streaming_llm(family: Family) -> None:
    await equals_streaming_llm(family, "dynamic")


@pytest.mark.short(4)
@pytest.mark.parametrize("family", _each("gemma3"))
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "dynamic"])
async def test_in_the_other_layouts_it_does_too(family: Family, layout: str) -> None:
    await equals_streaming_llm(family, layout)


async def equals_streaming_llm(family: Family, layout: str) -> None:
    for case, run in zip(CASES, await runs_of(adapted(family), CASES, layout), strict=True):
        held = case.held(len(run.ledger) + 1)
        assert [i for span in run.kv.placement.kept for i in range(*span)] == [*held[-2], len(run.ledger) - 1]
        expect(run, StreamingReference(family).feed(run.ledger, held))


@pytest.mark.parametrize("name", ["glm", "gemma3"])
async def test_in_float64_nothing_is_left_of_the_difference(name: str) -> None:
    for case, run in zip(CASES, await runs_of(in_float64(name)), strict=True):
        expect(run, StreamingReference(family(name)).feed(run.ledger, case.held(len(run.ledger))), 1e-9)


async def errors_in_bf16(
    family: Family, cases: Sequence[Case], adapter: ModelAdapter | None = None, **how: Any
) -> Tensor:
    """Of the engine in bf16, against float64 with the same weights: all differences of logits."""
    errors = []
    runs = await runs_of(adapter or adapted(family, torch.bfloat16), cases, **how)
    for case, run in zip(cases, runs, strict=True):
        reference = StreamingReference(family, torch.bfloat16).feed(run.ledger, case.held(len(run.ledger)))
        errors.append(run.compared_with(reference))
    return torch.cat(errors)


_noise: dict[str, Tensor] = {}


async def noise_of_bf16(family: Family) -> Tensor:
    """The errors of the same prompts where nothing is evicted. Some prompts are worse than others: pooled."""
    if family.name not in _noise:
        _noise[family.name] = await errors_in_bf16(family, NOT_EVICTING)
    return _noise[family.name]


def rms(errors: Tensor) -> float:
    return float(errors.square().mean().sqrt())


async def expect_noise(family: Family, errors: Tensor) -> None:
    """Root mean square within 1.5, and the largest error within 2 times those of the noise."""
    noise = await noise_of_bf16(family)
    assert rms(errors) < 1.5 * rms(noise)
    assert errors.abs().max() < 2 * noise.abs().max()


@pytest.mark.parametrize("family", _each("llama", "llama_yarn", "gpt_neox", "gemma3", leave_out=ROUTED))
async def test_in_bf16_evicting_adds_nothing_to_the_noise(family: Family) -> None:
    await expect_noise(family, await errors_in_bf16(family, CASES))


# -- keys that were computed at positions of another count ------------------------------------------------------------


@pytest.mark.short(4)
@each_layout
@pytest.mark.parametrize("family", _each("llama_yarn"))
async def test_after_rebases_the_engine_equals_streaming_llm(family: Family, layout: str) -> None:
    for case, run in zip(CASES, await runs_of(adapted(family), layout=layout, rebase_at=90), strict=True):
        placement = run.kv.placement
        assert placement.bases[0][0] < PROMPT < placement.bases[-1][0], "one while it prefills, one while it decodes"
        assert placement.next_position < 110 < len(run.ledger)
        expect(run, StreamingReference(family).feed(run.ledger, case.held(len(run.ledger))))


@pytest.mark.parametrize("name", FROZEN)
async def test_what_counts_anew_at_each_eviction_equals_streaming_llm(name: str) -> None:
    """No position reaches the one from which the frequencies would be others."""
    for case, run in zip(CASES, await runs_of(adapted(family(name)), rebase_at=0), strict=True):
        assert len(run.kv.placement.bases) >= 5
        expect(run, StreamingReference(family(name)).feed(run.ledger, case.held(len(run.ledger))))


async def test_in_float64_nothing_is_left_of_the_difference_after_rebases() -> None:
    for case, run in zip(CASES, await runs_of(in_float64("gemma3"), rebase_at=90), strict=True):
        expect(run, StreamingReference(family("gemma3")).feed(run.ledger, case.held(len(run.ledger))), 1e-9)


async def test_in_bf16_rebases_add_nothing_to_the_noise() -> None:
    """Each key is turned from where it was computed, however often the count began anew."""
    await expect_noise(family("llama"), await errors_in_bf16(family("llama"), CASES, rebase_at=50))


# -- 100,000 positions between prefix and window ----------------------------------------------------------------------

FAR = 100_000


async def far_apart(
    adapter: ModelAdapter, layout: str = "dynamic", rebase_at: int = 10 * FAR
) -> tuple[Run, Callable[..., Tensor]]:
    """A session whose first ``PINNED`` tokens are held and the next 100,000 are gone, then 25 tokens, then ``TOKENS``.

    Its own prefix is computed, and put where it is after the evictions. The second value makes the reference's logits.
    """
    start, more = prompt(PINNED, 7), prompt(25, 8)
    async with working(adapter, layout, rebase_at) as engine:
        first = engine.layout.open(0, 200)
        await engine.submit(Job(first, start, 64)).finished()
        kv = engine.layout.open(0, 200)
        kv.place(Placement(PINNED + FAR, (Span(0, PINNED),), lineage="far", floor=PINNED + FAR))
        for group, layers in enumerate(adapter.geometry.groups):
            if layers.window is None:
                (span,) = kv.visible(group)
                source, target = first.read(group, span), kv.target(group, span)
                for mine, theirs in ((target.keys, source.keys), (target.values, source.values)):
                    for into, out in zip(mine, theirs, strict=True):
                        into.copy_(out)
        kv.restored([*start, *[1] * FAR])
        assert kv.next_position == PINNED + FAR
        job, recorder = generating(kv, more, TOKENS)
        job.retention = SINK.retention
        (run,) = await finished(engine, [(job, recorder)])

    def reference(family: Family, dtype: torch.dtype = torch.float32) -> Tensor:
        new = [*more, *run.tokens[:-1]]
        held = SINK.held(PINNED + len(new))
        shifted = [[i if i < PINNED else i + FAR for i in indices] for indices in held[PINNED:]]
        streaming = StreamingReference(family, dtype)
        streaming.feed(start, everything(PINNED))
        streaming.jump(FAR)
        return streaming.feed(new, shifted)

    return run, reference


MOVED_FAR = ("llama", "llama_yarn", "llama_llama3", "gpt_neox", "glm", "gemma3")


@pytest.mark.short(6)
@pytest.mark.parametrize(
    ("name", "layout"),
    [*((name, "dynamic") for name in MOVED_FAR), *(("gemma3", layout) for layout in LAYOUTS if layout != "dynamic")],
)
async def test_100_000_positions_apart_nothing_is_left_of_the_difference(name: str, layout: str) -> None:
    """With a model that makes its own angles in float64 as well."""
    run, reference = await far_apart(in_float64(name), layout)
    (_, gap), (window, _) = run.kv.placement.kept
    assert gap == PINNED and window > gap + FAR, "it went on evicting"
    expect(run, reference(family(name)), 1e-9)


@pytest.mark.parametrize("name", ["llama", "llama_yarn", "gpt_neox", "gemma3"])
async def test_100_000_positions_apart_bf16_has_the_noise_of_bf16(name: str) -> None:
    run, reference = await far_apart(adapted(family(name), torch.bfloat16))
    await expect_noise(family(name), run.compared_with(reference(family(name), torch.bfloat16)))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
async def test_at_100_000_the_count_begins_anew(name: str) -> None:
    """At the limit as it is: a prefix turned by 100,000, then a window that is turned back."""
    run, reference = await far_apart(in_float64(name), rebase_at=Layout.rebase_at)
    assert run.kv.placement.bases and run.kv.placement.next_position < 100
    expect(run, reference(family(name)), 1e-9)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
async def test_100_000_positions_apart_float32_is_off_by_the_models_own_angles(name: str) -> None:
    """Which it makes in float32, for window keys and queries: up to 0.004 radians. Little beside bf16's noise."""
    run, reference = await far_apart(adapted(family(name)))
    errors = run.compared_with(reference(family(name)))
    assert rms(errors) < 0.05 * rms(await noise_of_bf16(family(name)))


# -- through the runtime ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stay:
    """A session that is suspended and comes back: its policy, its first append, and how much is said each time."""

    model: str
    policy: str
    held: Callable[[int, int, Sequence[ItemView]], list[list[int]]]
    first: int | list[dict[str, Any]] = 150
    said: int = 22
    settings: tuple[tuple[str, Any], ...] = ()
    system: str | None = None

    def __str__(self) -> str:
        layout = dict(self.settings).get("layout", "dynamic")
        return f"{self.model}-{self.policy}-{layout}{'-system' if self.system else ''}"


def _windows(window: int, slack: int, sinks: int | None = None) -> Callable[..., list[list[int]]]:
    def held(length: int, pinned: int, items: Sequence[ItemView]) -> list[list[int]]:
        return streaming_llm(length, window, slack, max(4, pinned) if sinks is None else sinks)

    return held


def _rounds(count: int) -> list[dict[str, Any]]:
    """A question, a call, its result, again and again."""
    messages: list[dict[str, Any]] = []
    for i in range(count):
        call = {"id": f"c{i}", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
        messages += [
            {"role": "user", "content": f"How is the weather in Paris on day {i}?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{i}", "content": f"{i} degrees and {'rain, ' * (i + 9)}"},
        ]
    return messages


STAYS = (
    Stay("llama", "sink:64,slack=24", _windows(64, 24)),
    Stay("llama", "sink:64,slack=24", _windows(64, 24), settings=(("layout", "static"),)),
    Stay("llama", "sink:128,slack=40", _windows(128, 40), system="You are a helpful assistant."),
    Stay("gemma3", "sink:64:9,slack=24", _windows(64, 24, 9)),
    Stay("gpt_neox", "sliding:48,slack=24", _windows(48, 24, 0)),
    Stay(
        "qwen2_yarn",
        "turns:300,keep_last_turns=2,slack=60",
        lambda length, pinned, items: by_policy(length, TurnWindow(300, keep_last_turns=2, slack=60), pinned, items),
        first=_rounds(4),
        system="You are a helpful assistant.",
    ),
    Stay("llama", "sink:900,slack=120", _windows(900, 120), first=1500),
)


async def stayed(tmp_path: Path, stay: Stay) -> None:
    """Said, suspended to disk in the middle of a window, closed, opened, said, suspended to memory, and said."""
    folder = (chat_folder if stay.system else model_folder)(tmp_path / "models", stay.model)
    settings = dict(stay.settings)
    replies: list[tuple[int, Reply]] = []

    async def say(session: Session, ids: list[int]) -> None:
        reply = await session.generate_tokens(ids, max_tokens=stay.said, logprobs=5, ignore_eos=True)
        replies.append(((await session.state()).ledger_tokens, reply))

    def in_the_middle(session: Session) -> Placement:
        """Evicted from since, and not full yet: the next eviction comes after the resume."""
        live, policy = session._core.kv, parse_policy(stay.policy)
        assert live is not None and policy.window is not None
        assert live.placement.lineage and live.tokens < policy.window < live.length
        if policy.name != "turns":
            assert live.tokens > policy.window - policy.slack
        return live.placement

    async with opened(tmp_path / "home", folder, **settings) as kv:
        session = await kv.sessions.create(stay.system, policy=stay.policy)
        if isinstance(stay.first, int):
            await session.append_tokens(prompt(stay.first))
        else:
            for i in range(0, len(stay.first), 3):
                await session.append(stay.first[i : i + 3])
        await say(session, prompt(5))
        before = in_the_middle(session)
        assert bool(before.bases) is (Layout.rebase_at < before.length)
        await session.suspend("disk")
    async with opened(tmp_path / "home", folder, **settings) as kv:
        session = await kv.sessions.get(session.id)
        await say(session, prompt(7))
        assert replies[-1][1].restore.source == "disk"
        await say(session, prompt(3))
        in_the_middle(session)
        await session.suspend("host")
        await say(session, prompt(4))
        assert replies[-1][1].restore.source == "host"
        for _, reply in replies[1:]:
            assert reply.restore.reason is None and reply.restore.recompute is None, reply.restore
        after = session._core.kv
        ids, items = await session.token_ids(), await session.items()
        pinned = len((await session.state()).pinned)
    assert after is not None and after.placement.lineage != before.lineage, "it evicted after the resume"
    views = [ItemView(item.span, item.role, item.kind, item.turn) for item in items]
    held = stay.held(len(ids), pinned, views)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    logits = StreamingReference(family(stay.model), model=model.eval()).feed(ids[:-1], held)
    scores = torch.log_softmax(logits, -1)
    for end, reply in replies:
        assert reply.logprobs is not None and len(reply.logprobs) == stay.said
        for at, said in enumerate(reply.logprobs, end - stay.said - 1):
            assert int(logits[at].argmax()) == said.token == ids[at + 1]
            for token, logprob in [(said.token, said.logprob), *said.top]:
                assert abs(logprob - float(scores[at, token])) < TOLERANCE, (at, token)


@pytest.mark.short(3)
@pytest.mark.parametrize("stay", STAYS, ids=str)
async def test_suspended_in_the_middle_of_a_window_a_session_equals_streaming_llm(tmp_path: Path, stay: Stay) -> None:
    await stayed(tmp_path, stay)


@pytest.mark.parametrize("stay", [STAYS[0], STAYS[3], STAYS[5]], ids=str)
async def test_suspended_after_a_rebase_a_session_equals_streaming_llm(
    tmp_path: Path, stay: Stay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Layout, "rebase_at", 100)
    await stayed(tmp_path, stay)


# -- controls ---------------------------------------------------------------------------------------------------------


def not_turned(adapter: ModelAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys stay where they were computed: sinks without StreamingLLM's positions."""
    adapter.geometry = replace(adapter.geometry, rotations=tuple(None for _ in adapter.geometry.rotations))


def one_too_many(adapter: ModelAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies before a gap is attended as if it overlapped what follows by a token."""
    right = PlacedKV._deltas

    def wrong(self: PlacedKV, placement: Placement, held: Sequence[Span]) -> list[tuple[int, int]]:
        return [(tokens, delta and delta + 1) for tokens, delta in right(self, placement, held)]

    monkeypatch.setattr(PlacedKV, "_deltas", wrong)


def other_base(adapter: ModelAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full layers are turned with the frequencies of sliding ones, and the other way round."""
    bases = list(dict.fromkeys(adapter.geometry.rotations))
    assert len(bases) == 2
    swapped = tuple(bases[r == bases[0]] for r in adapter.geometry.rotations)
    adapter.geometry = replace(adapter.geometry, rotations=swapped)


def wrong_pairs(adapter: ModelAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-split dimensions as if they were interleaved, or the other way round."""
    flipped = tuple(r and Rotation(r.frequencies, not r.interleaved) for r in adapter.geometry.rotations)
    adapter.geometry = replace(adapter.geometry, rotations=flipped)


Damage = Callable[[ModelAdapter, pytest.MonkeyPatch], None]
each_damage = pytest.mark.parametrize(
    ("name", "damage"),
    [
        *[(name, damage) for name in ("llama", "gpt_neox", "gemma3") for damage in (not_turned, one_too_many)],
        ("gemma3", other_base),
        ("glm", wrong_pairs),
    ],
    ids=lambda v: getattr(v, "__name__", v),
)


@each_damage
async def test_control_wrong_keys_do_not_pass(name: str, damage: Damage, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapted(family(name))
    damage(adapter, monkeypatch)
    for case, run in zip(CASES, await runs_of(adapter), strict=True):
        errors = run.compared_with(StreamingReference(family(name)).feed(run.ledger, case.held(len(run.ledger))))
        if case.policy.name != "sliding":  # which has nothing before a gap
            assert errors.abs().max() > 200 * TOLERANCE, case


@pytest.mark.parametrize(
    ("name", "damage"), [("llama", not_turned), ("llama", one_too_many), ("gemma3", other_base), ("gemma3", not_turned)]
)
async def test_control_wrong_keys_are_no_noise_of_bf16(
    name: str, damage: Damage, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = adapted(family(name), torch.bfloat16)
    damage(adapter, monkeypatch)
    errors = await errors_in_bf16(family(name), CASES, adapter)
    assert rms(errors) > 5 * rms(await noise_of_bf16(family(name)))


async def test_control_keys_that_are_not_turned_are_at_their_ledger_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The damage is what it says, and the reference can tell the two apart."""
    adapter = adapted(family("llama"))
    not_turned(adapter, monkeypatch)
    for case, run in zip(CASES, await runs_of(adapter), strict=True):
        reference = StreamingReference(family("llama"), positions="ledger")
        expect(run, reference.feed(run.ledger, case.held(len(run.ledger))))


async def test_control_a_window_that_is_computed_again_does_not_pass() -> None:
    """Its keys had seen what is gone by now: StreamingLLM is not a shorter prompt."""
    (run,) = await runs_of(adapted(family("llama")), [SINK])
    held = SINK.held(len(run.ledger))[-1]
    ids = [run.ledger[i] for i in [*held, len(run.ledger) - 1]]
    again = StreamingReference(family("llama")).feed(ids, everything(len(ids)))
    assert (run.logits[-1] - again[-1]).abs().max() > 200 * TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gemma3"])
async def test_control_angles_in_float32_are_off_at_100_000(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def coarse(keys: Tensor, deltas: Sequence[tuple[int, int]], rotation: Rotation) -> Tensor:
        parts, at = [], 0
        for tokens, delta in deltas:
            angles = torch.tensor(rotation.frequencies, dtype=torch.float32) * delta
            turned = Rotation(tuple((angles.double() / (delta or 1)).tolist()), rotation.interleaved)
            parts.append(rotate(keys[:, at : at + tokens], [(tokens, delta)], turned))
            at += tokens
        return torch.cat(parts, 1)

    monkeypatch.setattr(agentkv.kv.buffers, "rotate", coarse)
    run, reference = await far_apart(in_float64(name))
    errors = run.compared_with(reference(family(name)))
    assert errors.abs().max() > 1e-5
