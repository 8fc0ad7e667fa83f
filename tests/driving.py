"""Driving the real engine in tests: sinks that gate the model thread, samplers that keep the logits they saw."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch
from families import VOCAB, Family
from torch import Tensor

from agentkv.engine.adapter import ModelAdapter
from agentkv.engine.engine import Engine
from agentkv.engine.job import Generation, Job, TokenSink, Verdict
from agentkv.engine.sampling import Sampler, TokenLogprob
from agentkv.kv.contract import SequenceKV, Slot
from agentkv.kv.dynamic import DynamicKV, DynamicLayout
from agentkv.kv.recurrent import RecurrentKV, RecurrentLayout
from agentkv.schemas.sampling import SamplingParams

CPU = torch.device("cpu")
PATIENCE = 60.0
"""Seconds that a test waits for another thread before it fails."""


class Recorder(Sampler):
    """A sampler that keeps a copy of each row of logits it was given."""

    def __init__(self, params: SamplingParams) -> None:
        super().__init__(params, CPU)
        self.plain = False
        self.rows: list[Tensor] = []

    def sample(self, logits: Tensor, history: Sequence[int]) -> int:
        self.rows.append(logits.clone())
        return super().sample(logits, history)


class Hooked(TokenSink):
    """Collects tokens. ``at`` maps a count of tokens to what is then called on the model thread."""

    def __init__(self, at: dict[int, Callable[[], None]] | None = None, stop_after: int | None = None) -> None:
        self.tokens: list[int] = []
        self._at = at or {}
        self._stop_after = stop_after

    def push(self, token: int, logprob: TokenLogprob | None) -> Verdict:
        self.tokens.append(token)
        if len(self.tokens) in self._at:
            self._at[len(self.tokens)]()
        return "stop" if len(self.tokens) == self._stop_after else "go on"


class Gate:
    """A point where the model thread stops until the test opens it."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._open = threading.Event()

    def __call__(self) -> None:
        self._reached.set()
        assert self._open.wait(PATIENCE), "the test never opened the gate"

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, PATIENCE), "the model thread never came here"

    def open(self) -> None:
        self._open.set()


class Watched:
    """Before a real layout: ``steps`` lists the tokens of each slot, step by step, ``before`` is called before each."""

    steps: list[list[int]]
    before: Callable[[Sequence[Slot]], None]

    def plan(self, slots: Sequence[Slot]) -> Any:
        self.steps.append([slot.tokens for slot in slots])
        self.before(slots)
        return super().plan(slots)  # type: ignore[misc]

    @property
    def mixed_steps(self) -> int:
        """Steps in which some session decoded while another prefilled."""
        return sum(min(step) == 1 and max(step) > 1 for step in self.steps)


class WatchedLayout(Watched, DynamicLayout):
    """The real layout, watched."""

    def __init__(self, adapter: ModelAdapter) -> None:
        super().__init__(adapter.geometry, CPU)
        self.steps, self.before = [], lambda slots: None


class WatchedRecurrent(Watched, RecurrentLayout):
    """The same of a model with recurrent layers."""

    def __init__(self, adapter: ModelAdapter) -> None:
        super().__init__(adapter.geometry, CPU, DynamicLayout)
        self.steps, self.before = [], lambda slots: None


@asynccontextmanager
async def running(adapter: ModelAdapter, *, joint_rows: int = 64) -> AsyncIterator[tuple[Engine, WatchedLayout]]:
    """An engine with its own thread, over a watched layout."""
    layout: Any = (WatchedRecurrent if adapter.geometry.recurrent else WatchedLayout)(adapter)
    engine = Engine(adapter, layout, joint_rows=joint_rows)
    engine.start()
    try:
        yield engine, layout
    finally:
        await engine.stop()


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random ids."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(1, VOCAB, (length,), generator=generator).tolist()


def generating(
    kv: SequenceKV,
    feed: Sequence[int],
    tokens: int,
    *,
    piece: int = 64,
    resume_points: Sequence[int] = (),
    sink: TokenSink | None = None,
    **sampling: object,
) -> tuple[Job, Recorder]:
    """A job that computes ``feed`` and generates, and the recorder of its logits."""
    recorder = Recorder(SamplingParams.build(**sampling))
    generation = Generation(recorder, tokens, sink or Hooked())
    return Job(kv, feed, piece, resume_points, generation), recorder


def snapshot(kv: DynamicKV) -> tuple[list[int], list[tuple[Tensor, ...]]]:
    """The ids, and copies of all that later queries can see."""
    kv.check_integrity()
    tensors = []
    for index in range(len(kv.geometry.groups)):
        blocks = [kv.read(index, run) for run in kv.visible(index)]
        tensors.append(tuple(t.clone() for block in blocks for t in (*block.keys, *block.values)))
    return list(kv.ids), tensors


def assert_same(a: tuple[list[int], list[tuple[Tensor, ...]]], b: tuple[list[int], list[tuple[Tensor, ...]]]) -> None:
    """Two snapshots have the same ids and the same bits."""
    assert a[0] == b[0]
    for group, (mine, other) in enumerate(zip(a[1], b[1], strict=True)):
        assert all(torch.equal(x, y) for x, y in zip(mine, other, strict=True)), f"group {group}"


def zero_states(kv: SequenceKV, *kinds: str) -> None:
    """What recurrent layers carry is lost, as far as it is of ``kinds``."""
    assert isinstance(kv, RecurrentKV)
    assert {key.kind for key in kv.state} >= set(kinds)
    kv._state = {key: torch.zeros_like(t) if key.kind in kinds else t for key, t in kv.state.items()}


def adapted(family: Family, seed: int = 0) -> ModelAdapter:
    """The family's model behind the engine's interface."""
    return ModelAdapter(family.build(seed))
