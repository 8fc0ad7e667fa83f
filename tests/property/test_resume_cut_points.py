"""Suspended, resumed, reopened at random moments, a session computes what transformers computes in one pass.

In float32 on tiny random models of every family. The ledgers are longer than the sliding windows, and every turn ends
a chunk, so that windows lie across several chunks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from driving import zero_states
from families import FAMILIES, VOCAB, Family
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from agentkv import AgentKV
from agentkv.kv.contract import SequenceKV
from agentkv.schemas.replies import Reply

TOLERANCE = 1e-3
"""Largest difference of a log-probability; float32 noise here is below 1e-4."""
LIMIT = 240
"""Tokens of a session; the models' context is 256."""


@dataclass
class Bench:
    """One family's model in a folder, transformers' own copy of it, and a home whose runtime opens and closes."""

    path: Path
    home: Path
    reference: PreTrainedModel
    runner: asyncio.Runner
    kv: AgentKV | None = None

    async def open(self) -> AgentKV:
        if self.kv is None:
            self.kv = await AgentKV.open(
                model=str(self.path), home=self.home, dtype="float32", idle_seconds=3600, idle_codec="exact"
            )
        return self.kv

    async def close(self) -> None:
        if self.kv is not None:
            await self.kv.close()
        self.kv = None

    def logits(self, ids: list[int]) -> torch.Tensor:
        """transformers' logits ``[len(ids), vocab]``, in one pass without any cache."""
        return self.reference(torch.tensor([ids]), use_cache=False).logits[0]


VARIANTS = {
    *("gemma4", "qwen3_moe", "olmo2", "llama_llama3", "llama_yarn", "qwen2_yarn", "llama_dynamic"),
    *("qwen3_5", "bamba", "nemotron_h"),
}
"""Families whose KV state is of the same kind as another's: in the full suite only."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(f, id=f.name, marks=[pytest.mark.full] if f.name in VARIANTS else []) for f in FAMILIES],
)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    family: Family = request.param
    folder = tmp_path_factory.mktemp(family.name)
    model = family.build()
    model.save_pretrained(folder / "model")
    with asyncio.Runner() as runner:
        found = Bench(folder / "model", folder / "home", model, runner)
        yield found
        runner.run(found.close())


@dataclass
class Played:
    """A session, and what must be true of it."""

    bench: Bench
    id: str = ""
    ledger: list[int] = field(default_factory=list)
    cached: int = 0
    """Tokens with KV."""
    where: str = "new"
    generated: list[tuple[int, float]] = field(default_factory=list)
    """Ledger positions of generated tokens, with their log-probabilities."""
    damage: Callable[[SequenceKV], None] | None = None

    async def play(self, codec: str, operations: list[tuple[Any, ...]]) -> None:
        kv = await self.bench.open()
        self.id = (await kv.sessions.create(idle_codec=codec)).id
        for operation, *arguments in operations:
            await getattr(self, operation)(*arguments)
            await self.check()
        await (await self.session()).delete()

    async def session(self) -> Any:
        return await (await self.bench.open()).sessions.get(self.id)

    async def append(self, ids: list[int]) -> None:
        ids = ids[: LIMIT - len(self.ledger)]
        if ids:
            await self._counted((await self.session()).append_tokens(ids), len(self.ledger) + len(ids) - 1)
            self.ledger += ids
            self._live(len(self.ledger) - 1)

    async def generate(self, ids: list[int], tokens: int) -> None:
        ids = ids[: LIMIT - tokens - len(self.ledger)]
        if len(self.ledger) + len(ids) == 0 or len(self.ledger) + len(ids) + tokens > LIMIT:
            return
        prompt = len(self.ledger) + len(ids)
        turn = (await self.session()).generate_tokens(ids, max_tokens=tokens, logprobs=0)
        reply: Reply = await self._counted(turn, prompt + tokens - 1)
        assert (len(reply.ids), reply.finish_reason) == (tokens, "length")
        assert reply.usage.prompt_tokens == prompt
        # All that was stored is reused: the window's keys, too.
        assert reply.usage.cached_tokens == reply.restore.tokens == self.cached
        assert reply.restore.reason is None
        assert reply.restore.recomputed_tokens == 0
        if self.cached:
            assert reply.restore.source == self.where
        self.ledger += ids
        for entry in reply.logprobs or ():
            self.generated.append((len(self.ledger), entry.logprob))
            self.ledger.append(entry.token)
        self._live(len(self.ledger) - 1)

    async def _counted(self, turn: Any, reached: int) -> Any:
        """The turn's result; the model has computed the tokens without KV, and no others."""
        engine = (await self.bench.open()).model.engine
        before = engine.computed_tokens
        result = await turn
        assert engine.computed_tokens - before == reached - self.cached
        return result

    def _live(self, cached: int) -> None:
        self.cached, self.where = cached, "device"

    async def suspend(self, tier: str) -> None:
        report = await (await self.session()).suspend(tier)
        assert report.tokens == self.cached
        if self.cached and not (self.where == "disk" and tier == "host"):
            assert report.tier == tier
            self.where = tier

    async def resume(self) -> None:
        report = await (await self.session()).resume()
        assert (report.tokens, report.reason) == (self.cached, None)
        if self.cached:
            assert report.source == self.where
            self.where = "device"
        if self.damage is not None:
            self.damage((await self.session())._core.kv)

    async def reopen(self) -> None:
        await self.bench.close()
        if self.cached:
            self.where = "disk"

    async def check(self) -> None:
        session = await self.session()
        assert await session.token_ids() == self.ledger
        if (state := session._core.kv) is not None:
            state.check_integrity()
            assert list(state.ids) == self.ledger[: self.cached]

    def largest_difference(self) -> float:
        """How far the generated tokens' log-probabilities are from transformers' own, and they from its likeliest."""
        if not self.generated:
            return 0.0
        theirs = torch.log_softmax(self.bench.logits(self.ledger).float(), dim=-1)
        assert theirs.std() > 0.5, "logits too flat to tell anything"
        largest = 0.0
        for position, logprob in self.generated:
            row = theirs[position - 1]
            chosen = row[self.ledger[position]].item()
            largest = max(largest, abs(chosen - logprob), row.max().item() - chosen)
        return largest


token = st.integers(0, VOCAB - 1)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(token, min_size=1, max_size=40)),
        st.tuples(st.just("generate"), st.lists(token, max_size=12), st.integers(1, 8)),
        st.tuples(st.just("suspend"), st.sampled_from(["host", "disk"])),
        st.tuples(st.just("resume")),
        st.tuples(st.just("reopen")),
    ),
    min_size=3,
    max_size=10,
)


def _continues_everywhere(bench: Bench, codec: str, played: list[tuple[Any, ...]]) -> None:
    session = Played(bench)
    # Whatever was drawn, the session ends by sleeping, and waking to speak.
    bench.runner.run(session.play(codec, [*played, ("suspend", "disk"), ("generate", [7, 8], 6)]))
    assert session.largest_difference() < TOLERANCE


_SHARED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.mark.short(4)
@settings(max_examples=6, suppress_health_check=_SHARED)
@given(codec=st.sampled_from(["exact", "raw"]), played=operations)
def test_wherever_it_is_cut_a_session_goes_on_as_transformers_would(
    bench: Bench, codec: str, played: list[tuple[Any, ...]]
) -> None:
    _continues_everywhere(bench, codec, played)


@pytest.mark.full
@settings(max_examples=30, suppress_health_check=_SHARED)
@given(codec=st.sampled_from(["exact", "raw"]), played=operations)
def test_wherever_it_is_cut_a_session_goes_on_as_transformers_would_many_times(
    bench: Bench, codec: str, played: list[tuple[Any, ...]]
) -> None:
    _continues_everywhere(bench, codec, played)


LONG: list[tuple[Any, ...]] = [
    ("append", list(range(3, 43))),
    ("generate", [5, 6], 8),
    ("suspend", "disk"),
    ("reopen",),
    ("generate", [9], 8),
    ("append", [1, 2, 3]),
    ("generate", [], 4),
    ("reopen",),
    ("resume",),
    ("generate", [60, 61], 8),
]
"""Several chunks within each window, restored twice."""


@pytest.mark.short(4)
def test_windows_across_chunks_are_restored_and_not_computed(bench: Bench) -> None:
    session = Played(bench)
    bench.runner.run(session.play("exact", LONG))
    assert session.largest_difference() < TOLERANCE


@pytest.mark.short(4)
def test_control_a_damaged_restore_is_seen_in_each_layer_group(bench: Bench) -> None:
    geometry = bench.runner.run(bench.open()).model.adapter.geometry
    for group in range(len(geometry.groups)):

        def damage(kv: SequenceKV, group: int = group) -> None:
            if states := kv.geometry.groups[group].states:
                zero_states(kv, *(state.kind for state in states))
                return
            for run in kv.visible(group):
                for keys in kv.read(group, run).keys:
                    keys.copy_(keys.flip(1))

        session = Played(bench, damage=damage)
        bench.runner.run(session.play("exact", LONG))
        assert session.largest_difference() > 10 * TOLERANCE, geometry.groups[group].name
