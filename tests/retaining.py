"""Sessions under retention policies in tests: what must be held is worked out token by token, beside the engine."""

from __future__ import annotations

from collections.abc import Sequence

from homes import check_home, check_session, written

from agentkv import AgentKV
from agentkv.policies.retention import ItemView, RetentionPolicy, SessionView, kept_by, parse_policy
from agentkv.schemas.replies import Item, Reply, SessionInfo
from agentkv.sessions.session import Session
from agentkv.types import Span

__all__ = ["assert_equal_replies", "check_held", "check_stored", "held_after", "positions", "same_words"]


def positions(spans: Sequence[Span]) -> list[int]:
    """All positions in ``spans``, in order."""
    return [i for span in spans for i in range(*span)]


def _spans(held: Sequence[int]) -> tuple[Span, ...]:
    starts = [p for i, p in enumerate(held) if i == 0 or held[i - 1] != p - 1]
    stops = [p + 1 for i, p in enumerate(held) if i + 1 == len(held) or held[i + 1] != p + 1]
    return tuple(Span(*pair) for pair in zip(starts, stops, strict=True))


def held_after(
    policy: str | RetentionPolicy,
    items: Sequence[Item],
    pinned: int,
    length: int,
    *,
    held: Sequence[int] = (),
    start: int = 0,
) -> list[int]:
    """Positions held once ``length`` tokens have gone through ``policy``, one by one, from a state that held ``held``
    at ``start``."""
    policy, found = parse_policy(policy), list(held)
    for at in range(start, length):
        if policy.window is not None and len(found) >= policy.window:
            views = tuple(
                ItemView(Span(item.span.start, min(item.span.stop, at)), item.role, item.kind, item.turn)
                for item in items
                if item.span.start < at
            )
            found = positions(kept_by(policy, SessionView(at, _spans(found), Span(0, pinned), views)))
        found.append(at)
    return found


async def check_held(kv: AgentKV, session: Session, expected: Sequence[int] | None = None) -> SessionInfo:
    """``state()`` is what the tensors are, and what the policy says (or ``expected``: positions with KV)."""
    await check_session(kv, session)
    state, items, core = await session.state(), await session.items(), session._core
    length, ledger = core.record.kv_length, state.ledger_tokens
    if expected is None:
        expected = held_after(state.policy, items, state.pinned.stop, length)
    kept = [*expected, *range(length, ledger)]
    assert positions(state.kept) == kept
    assert state.kept == _spans(kept), "adjacent spans are one"
    assert state.evicted == _spans(sorted(set(range(ledger)) - set(kept)))
    assert [item.id for item in state.items] == [item.id for item in items]
    for item in state.items:
        count = len(set(range(*item.span)) & set(kept))
        assert (item.kept, item.evicted) == (count, count == 0), item
    assert state.kv_tokens == len(expected)
    window = parse_policy(state.policy).window
    assert window is None or state.kv_tokens <= max(window, len(expected))
    if core.kv is not None:
        geometry = core.kv.geometry
        sizes: dict[str, int] = {}
        for index, group in enumerate(geometry.groups):
            blocks = [core.kv.read(index, run) for run in core.kv.visible(index)]
            if group.window is None:
                assert positions(core.kv.visible(index)) == list(expected)
            sizes[group.name] = sum(block.nbytes for block in blocks)
        assert dict(state.bytes_by_layers) == sizes
        assert state.next_position == core.kv.next_position
        assert state.device_bytes == core.kv.nbytes == core.reserved
    return state


async def check_stored(kv: AgentKV, session: Session) -> None:
    """On disk is what the session holds, in chunks of which something is needed, and no file of anything else."""
    await written(kv)
    await check_home(kv)
    state = await session.state()
    manifest = await kv.sessions.repository.manifest(session.id)
    needed = set(positions(state.kept))
    for group in kv.model.adapter.geometry.groups:
        if group.window is not None:
            needed |= set(range(max(0, manifest.length - group.window), manifest.length))
    for segment in manifest.segments:
        assert needed & set(range(*segment.span)), f"{segment.span} is of no use any more"
    stored = set(positions([segment.span for segment in manifest.segments]))
    for point in manifest.resume_points:
        assert stored >= set(positions(point.held.kept)), f"nothing can be resumed at {point.position}"
    records = await kv.sessions.list()
    named = {
        segment.chunk_id
        for record in records
        for segment in (await kv.sessions.repository.manifest(record.id)).segments
    }
    assert (
        {name for name, _ in kv.sessions.tiers.blobs.list()} == named == await kv.sessions.repository.known_chunk_ids()
    )
    assert len(manifest.resume_points) <= 2 + len(manifest.segments), "points go with what they need"


def assert_equal_replies(mine: Reply, twin: Reply, tolerance: float = 1e-4) -> None:
    """The same tokens with the same probabilities, but for float32 noise."""
    assert mine.ids == twin.ids
    for one, other in zip(mine.logprobs or (), twin.logprobs or (), strict=True):
        assert abs(one.logprob - other.logprob) <= tolerance, (one, other)


def same_words(count: int, seed: int = 0) -> str:
    """A text of about so many tokens."""
    return " ".join(f"w{(i * 7 + seed) % 97}" for i in range(count // 3))
