"""One session in this process: its record, its ledger, its KV, and who may touch them."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from agentkv.engine.templates import ChatTemplate, LastRole
from agentkv.engine.toolcalls.choosing import ToolUse
from agentkv.errors import SessionBusy, SessionDeleted, StorageError
from agentkv.kv.contract import CapturedPart, SequenceKV
from agentkv.policies.retention import ItemView, RetentionPolicy, parse_policy
from agentkv.schemas.messages import Message, ToolCall
from agentkv.sessions.chains import Chain, root_of
from agentkv.sessions.db.records import Cut, ItemRecord, Manifest, SessionRecord
from agentkv.sessions.db.repository import Repository
from agentkv.sessions.stats import Counts, Held
from agentkv.types import SessionState

__all__ = ["SessionCore"]

_CONVERSATION = ("record", "ledger", "items", "views", "last_item", "calls", "last_calls", "last_finish", "chain")


@dataclass(slots=True, eq=False)
class SessionCore:
    """The state behind every handle of one session.

    ``gate`` is held by whoever changes KV: a turn, a demotion, a restore. ``stored``: ledger tokens that the manifest
    covers (``None``: ask it); ``snapped``: of which, and more, snapshots are taken; ``sealed``: up to where a lossy
    codec, in them, has encoded what it will. ``early``: sliding windows captured at resume points that may have to be
    stored yet. ``held``: its chunks in the host tier, with their bytes; ``unsaved``: what
    of them the disk refused, behind the manifest's end; ``refused``: what the disk, or its tenant's quota, said to its
    last write, ``None`` where it was taken. ``short``: why the last restore brought back fewer tokens than
    the last commit had. ``uses``: its turns, old ones fading; ``gap``: its mean pause; ``expected_at`` and
    ``pinned_until``: its user's hints, in monotonic seconds. ``parsed``: its policy, behind the text that
    it was read from.
    """

    record: SessionRecord
    state: SessionState
    kv: SequenceKV | None = None
    ledger: array[int] | None = None
    stored: int | None = None
    snapped: int | None = None
    sealed: int = 0
    early: dict[int, tuple[CapturedPart, ...]] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    unsaved: Manifest | None = None
    refused: StorageError | None = None
    short: str | None = None
    memory: Held = field(default_factory=Held)
    counts: Counts = field(default_factory=Counts)
    gate: asyncio.Lock = field(default_factory=asyncio.Lock)
    turns: int = 0
    writing: asyncio.Task[None] | None = None
    pending: int = 0
    written_chunks: int = 0
    uses: float = 0.0
    gap: float | None = None
    expected_at: float | None = None
    pinned_until: float = 0.0
    last_used: float = field(default_factory=time.monotonic)
    deleted: bool = False
    parsed: tuple[str, RetentionPolicy] | None = None
    items: int = 0
    views: list[ItemView] = field(default_factory=list)
    last_item: ItemRecord | None = None
    calls: dict[str, str] = field(default_factory=dict)
    """Every tool call in it: id to name."""
    last_calls: tuple[ToolCall, ...] = ()
    last_finish: str | None = None
    chain: Chain | None = None
    """Of all its items; ``None`` while the ledger is not loaded."""
    template: ChatTemplate | None = None
    tools_used: ToolUse | None = None

    @property
    def id(self) -> str:
        """The session's id."""
        return self.record.id

    @property
    def reserved(self) -> int:
        """Bytes reserved for it on the device."""
        return self.memory.nbytes

    @reserved.setter
    def reserved(self, nbytes: int) -> None:
        self.memory.become(nbytes)

    @property
    def idle(self) -> bool:
        """Whether nobody runs a turn on it, waits for one, or moves it."""
        return not self.turns and not self.gate.locked()

    def pinned(self, now: float) -> bool:
        """Whether its user wants it kept on the device; ``now`` in monotonic seconds."""
        return now < self.pinned_until

    def note_use(self, now: float) -> None:
        """A turn begins after a pause."""
        if self.uses:
            pause = now - self.last_used
            self.gap = pause if self.gap is None else self.gap + 0.3 * (pause - self.gap)
        self.uses = 1.0 + 0.9 * self.uses
        self.expected_at = None

    def drop_closed(self) -> None:
        """KV that could not be rolled back was closed: what is stored gives it back, or the ledger. Gate held."""
        if self.kv is not None and self.kv.closed:
            self.kv, self.state = None, SessionState.DISK

    @property
    def fresh(self) -> bool:
        """Whether the ledger holds the head and nothing else."""
        return self.record.ledger_length == self.record.pinned

    @asynccontextmanager
    async def turn(self, wait_seconds: float | None) -> AsyncIterator[Callable[[], None]]:
        """Be the session's only writer. ``None`` refuses with ``SessionBusy`` at once where another turn runs.

        A demotion or restore under way is waited for in any case: it is short, and the turn needs its outcome. Yields
        what to call when the turn has its answer: the next one is then not refused, though it still waits for the gate.
        """
        if self.turns and wait_seconds is None:
            raise SessionBusy(self.id)
        self.turns += 1
        counted = True

        def answered() -> None:
            nonlocal counted
            if counted:
                counted = False
                self.turns -= 1

        try:
            try:
                async with asyncio.timeout(wait_seconds if self.turns > 1 else None):
                    await self.gate.acquire()
            except TimeoutError:
                raise SessionBusy(self.id) from None
            try:
                self.check_open()
                self.note_use(time.monotonic())
                yield answered
            finally:
                self.last_used = time.monotonic()
                self.gate.release()
        finally:
            answered()

    def check_open(self) -> None:
        """``SessionDeleted`` once it is."""
        if self.deleted:
            raise SessionDeleted(self.id)

    async def load(self, repository: Repository) -> array[int]:
        """The ledger, and what the next turn must know of the last one. Call with the gate held."""
        if self.ledger is None:
            self.views = []
            items, last_turn, ledger = await asyncio.gather(
                repository.items(self.id), repository.last_turn(self.id), repository.ledger(self.id)
            )
            self.last_finish = last_turn.finish_reason if last_turn else None
            self.chain = Chain(root_of(self.record))
            self.note_items(items)
            self.ledger = ledger
        return self.ledger

    def forget_ledger(self) -> None:
        """It is to be read again: it is not what it was."""
        self.ledger = self.last_item = self.last_finish = self.chain = None
        self.items, self.views, self.calls, self.last_calls = 0, [], {}, ()

    def shorten(self, cut: Cut, items: Sequence[ItemRecord], finish: str | None) -> Callable[[], None]:
        """Be, in this process, the session that ends at ``cut``, with ``items``, and whose last turn ended by
        ``finish``. Returns what undoes that. Call with the ledger loaded."""
        assert self.ledger is not None
        before = {name: getattr(self, name) for name in _CONVERSATION}

        def put_back() -> None:
            for name, value in before.items():
                setattr(self, name, value)

        ledger = self.ledger[: cut.position]
        self.forget_ledger()
        self.chain = Chain(root_of(self.record))
        self.note_items(items)
        self.ledger, self.last_finish = ledger, finish
        self.record = replace(
            self.record,
            ledger_length=cut.position,
            kv_length=cut.kv_length,
            placement=cut.placement,
            policy_since=min(self.record.policy_since, cut.kv_length),
            turns=cut.turns,
        )
        return put_back

    def note_items(self, items: Sequence[ItemRecord]) -> None:
        """Keep what the next turn's rendering needs of newly committed items."""
        for item in items:
            self.items = item.seq + 1
            self.views.append(ItemView(item.span, item.role, item.kind, item.turn))
            self.last_item = item
            if self.chain is not None:
                self.chain.then_item(item, self.record)
            if item.role == "assistant" and item.kind != "tokens":
                self.last_calls = Message.from_canonical(item.content).tool_calls
                self.calls |= {call.id: call.name for call in self.last_calls}

    @property
    def policy(self) -> RetentionPolicy:
        """What stays in its KV state. ``InvalidRequest`` where the policy is not installed any more."""
        if self.parsed is None or self.parsed[0] != self.record.policy:
            self.parsed = self.record.policy, parse_policy(self.record.policy)
        return self.parsed[1]

    @property
    def evicts(self) -> bool:
        """Whether its KV state is, or will be, less than its ledger."""
        return self.policy.window is not None or self.record.placement is not None

    def limit(self, context: int) -> int:
        """Tokens that its KV state ever holds, where the model attends to ``context``.

        More than its window where that was made smaller: the next turn evicts.
        """
        return max(self.policy.window or context, self.record.held.tokens)

    @property
    def held_tokens(self) -> int:
        """Ledger tokens that the next turn starts from: held at the last commit, or without KV yet."""
        return self.record.held.tokens + self.record.ledger_length - self.record.kv_length

    @property
    def last_role(self) -> LastRole | None:
        """Role of the last message; ``None`` before the first, or after raw tokens."""
        item = self.last_item
        if item is None or item.kind == "tokens":
            return None
        role: LastRole = item.role  # type: ignore[assignment]
        return role

    def chat(self, tokenizer: Any) -> ChatTemplate:
        """The session's frozen template. Blocking the first time."""
        if self.template is None:
            r = self.record
            now = datetime.fromtimestamp(r.created_at if r.clock is None else r.clock, UTC)
            self.template = ChatTemplate(tokenizer, r.template_args, r.tools, r.system, now=now)
        return self.template

    def tool_use(self, tokenizer: Any, tool_format: str) -> ToolUse | None:
        """How its tools are called; ``None`` without tools. Blocking the first time.

        ``Unsupported`` where no format reads the calls that the template writes.
        """
        if self.tools_used is None and self.record.tools:
            self.tools_used = ToolUse.of(self.chat(tokenizer), tokenizer, self.record.tools, tool_format)
        return self.tools_used
