"""What must hold over a runtime and its home between any two operations."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable
from typing import Any, get_args

import torch
from retaining import positions
from soaking.oracle import Violation

from agentkv import AgentKV
from agentkv.kv.contiguous import ContiguousKV
from agentkv.kv.paged import PagedLayout
from agentkv.sessions.core import SessionCore
from agentkv.sessions.db.records import StoredState
from agentkv.types import SessionState
from managing.reference import Known
from managing.rows import Rows, SessionRow
from managing.trouble import Trouble

__all__ = ["check_bytes", "check_counts", "check_index", "check_sessions"]

_AT_REST = {SessionState.NEW, SessionState.LIVE, SessionState.HOST, SessionState.DISK}


def check_sessions(kv: AgentKV, rows: Rows, sessions: Iterable[Known]) -> None:
    """Each is in SQL what is known of it, and in memory what SQL says."""
    there, known = rows.sessions(), {one.id: one for one in sessions}
    if there.keys() != known.keys():
        raise Violation(f"sessions {there.keys() - known.keys()} are too many, {known.keys() - there.keys()} are gone")
    for table, mentioned in rows.mentioned().items():
        if strangers := mentioned - known.keys():
            raise Violation(f"{table} has rows of {strangers}, which do not exist")
    for one in known.values():
        one.check_unchanged(rows)
        _check_row(one, there[one.id])
    for core in kv.sessions.cores():
        if core.id not in there:
            raise Violation(f"{core!r} is held in memory, and deleted")
        if core.idle:
            _check_core(core, known[core.id], there[core.id])
    held = {name for core in kv.sessions.cores() for name in core.held}
    if held != set(kv.sessions.tiers.host._entries):
        raise Violation(f"host memory holds {set(kv.sessions.tiers.host._entries)}, sessions want {held}")


def _check_row(known: Known, row: SessionRow) -> None:
    length = len(known.ledger)
    if (row.ledger_length, row.turns, row.pinned) != (length, len(known.turns), known.pinned):
        raise Violation(f"{known.id} has the row {row}, known are {length} tokens in {len(known.turns)} turns")
    spoken_to = len(known.turns) > bool(known.pinned)
    if known.short:
        if row.kv_length not in (*range(max(length, 1)), *([length] if length == known.pinned else ())):
            raise Violation(f"{known.id} was cut, and has KV of {row.kv_length} tokens, its ledger {length}")
    elif row.kv_length not in ({length - 1} if spoken_to else {0, known.pinned}):
        raise Violation(f"{known.id} has KV of {row.kv_length} tokens, its ledger {length}")
    if row.state not in get_args(StoredState) or (row.state == "new" and row.kv_length):
        raise Violation(f"{known.id} is {row.state!r} in SQL with {row.kv_length} tokens of KV")
    if positions(row.held.kept) != known.held_at(row.kv_length):
        raise Violation(f"{known.id} holds {row.held.kept}, its policy says {known.held_at(row.kv_length)}")


def _check_core(core: SessionCore, known: Known, row: SessionRow) -> None:
    record = core.record
    mine = (record.policy, record.policy_since, record.turns, record.ledger_length, record.kv_length, record.held)
    if mine != (row.policy, row.policy_since, row.turns, row.ledger_length, row.kv_length, row.held):
        raise Violation(f"{core.id}: in memory {record}, in SQL {row}")
    if core.state not in _AT_REST:
        raise Violation(f"{core.id} is idle and {core.state}")
    if core.ledger is not None and list(core.ledger) != known.ledger:
        raise Violation(f"{core.id} has a ledger of {len(core.ledger)} tokens in memory, known are {len(known.ledger)}")
    if core.kv is not None:
        core.kv.check_integrity()
        if list(core.kv.ids) != known.ledger[: core.kv.length] or core.kv.length > row.kv_length:
            raise Violation(f"{core.id} has KV of {core.kv.length} tokens, or others; committed are {row.kv_length}")
        if core.kv.length == row.kv_length and core.kv.placement.kept != row.held.kept:
            raise Violation(f"{core.id} holds {core.kv.placement}, in SQL {row.held}")


def check_index(rows: Rows, trouble: Trouble) -> None:
    """Chunks are referenced as often as segments name them, each has its file and each file is of one.

    Nothing is stored behind what was committed.
    """
    for session_id, row in rows.sessions().items():
        if (length := rows.manifest(session_id).length) > row.kv_length:
            raise Violation(f"of {session_id} {length} tokens of KV are stored, committed are {row.kv_length}")
    chunks, uses, files = rows.chunks(), rows.uses(), trouble.files()
    if uses.keys() - chunks.keys():
        raise Violation(f"segments name {uses.keys() - chunks.keys()}, which have no row")
    if wrong := {name: (chunk.refs, uses[name]) for name, chunk in chunks.items() if chunk.refs != uses[name]}:
        raise Violation(f"references counted, and there: {wrong}")
    if not trouble.garbage and (unneeded := chunks.keys() - uses.keys()):
        raise Violation(f"nobody needs {unneeded}, which were not collected")
    if strangers := files.keys() - chunks.keys() - trouble.orphans:
        raise Violation(f"files without a row: {strangers}")
    for name, chunk in chunks.items():
        if name not in trouble.damaged and not chunk.deleting and files.get(name) != chunk.nbytes:
            raise Violation(f"chunk {name} of {chunk.nbytes} bytes has a file of {files.get(name)}")


def check_bytes(kv: AgentKV, trouble: Trouble) -> None:
    """Bytes that ``stats`` counts in each tier are those that are there."""
    tiers, stats = kv.sessions.tiers, kv.stats().tiers
    folder = kv.settings.blobs_dir
    files = [path for path in folder.rglob("*") if not path.is_dir()]
    if temporaries := [path.name for path in files if path.name.startswith(".tmp")]:
        raise Violation(f"half-written files: {temporaries}")
    found = sum(path.lstat().st_size for path in files)
    if stats["disk"].used != found + trouble.altered:
        raise Violation(f"{stats['disk'].used} bytes counted on disk, {found} there, {trouble.altered} taken")
    payloads = sum(len(entry.payload) for entry in tiers.host._entries.values())
    if stats["host"].used != payloads:
        raise Violation(f"{stats['host'].used} bytes counted in host memory, {payloads} there")
    cores = kv.sessions.cores()
    if any(not core.idle for core in cores):
        return
    live = _live_bytes(kv)
    if stats["device"].used != live:
        gc.collect()  # undo records hold pages until they are gone
        live = _live_bytes(kv)
    # Forks may be in the same pages, which count for each of them.
    shared = isinstance(tiers.layout, PagedLayout) and any(core.record.parent_id for core in cores)
    if stats["device"].used != live and not (shared and stats["device"].used > live):
        raise Violation(f"{stats['device'].used} bytes counted on the device, {live} there")


def _live_bytes(kv: AgentKV) -> int:
    """Of the tensors of all sessions, or of the pages that are taken."""
    layout = kv.sessions.tiers.layout
    if isinstance(layout, PagedLayout):
        return sum(pool.nbytes - pool.free * pool.page_nbytes for pool in layout.pools)
    return sum(_tensor_bytes(core.kv) for core in kv.sessions.cores() if isinstance(core.kv, ContiguousKV))


def check_counts(kv: AgentKV, events: Counter[str], totals: Counter[str]) -> None:
    """What ``stats`` and events say has happened since the runtime opened is what happened."""
    stats = kv.stats()
    told = {
        "turns": (stats.turns, totals["turns"]),
        "prompt tokens": (stats.prompt_tokens, totals["prompt"]),
        "completion tokens": (stats.completion_tokens, totals["said"]),
        "cached tokens": (stats.cached_tokens, totals["cached"]),
        "fallbacks": (sum(stats.fallbacks.values()), events["fallback"]),
        "created": (events["created"], totals["created"]),
        "deleted": (events["deleted"], totals["deleted"]),
        "lost events": (events["lost"], 0),
    }
    if wrong := {what: pair for what, pair in told.items() if pair[0] != pair[1]}:
        raise Violation(f"counts disagree: {wrong}")


def _tensor_bytes(root: object) -> int:
    """Of all tensors that can be reached from an object of this package, each storage once."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    todo: list[Any] = [root]
    while todo:
        found = todo.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, torch.Tensor):
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(found, list | tuple | set):
            todo.extend(found)
        elif isinstance(found, dict):
            todo.extend(found.values())
        elif type(found).__module__.startswith(("agentkv.kv", "agentkv.codecs")):
            todo.extend(getattr(found, "__dict__", {}).values())
            slots = [name for kind in type(found).__mro__ for name in getattr(kind, "__slots__", ())]
            todo.extend(getattr(found, name) for name in slots if hasattr(found, name))
    return sum(storages.values())
