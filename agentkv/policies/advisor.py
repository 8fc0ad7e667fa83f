"""What to set, from what was seen: plain rules over plain numbers, each with its reason in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from agentkv.policies.retention import window_kind

__all__ = ["USUAL_HIT_RATE", "Advice", "Observed", "advise"]

USUAL_HIT_RATE = 0.85
"""Of the tokens that are known, the share that is reused where nothing is wrong, and more."""

_SHORT_OF_LIMIT = 0.7
"""A conversation longer than this share of the context is about to reach its end."""
_FEW = 5
"""Sessions below which nothing is said about how long they are."""


@dataclass(frozen=True, slots=True)
class Observed:
    """A home's past. Tokens, bytes, seconds.

    ``sessions``; the median, the 95th percentile and the longest of their ``lengths``; the median ``gap`` between two
    turns of one session; ``together``: the most sessions that had a turn within one median gap (at least a minute).
    ``hit_rate``: of tokens already known, ``None`` where no turn came after another. ``context``: what the model
    attends to. ``token_bytes``: KV of one token. Budgets as they are in force; ``memory`` of the machine or device.
    ``full_share``: of sessions under policy ``full``; ``tool_share``: of tokens in tool results. ``calibrated``: the
    codec that ``auto`` means by measurement.
    """

    sessions: int
    lengths: tuple[int, int, int]
    gap: float | None
    together: int
    hit_rate: float | None
    context: int
    token_bytes: int
    device_budget: int
    host_budget: int
    disk_budget: int
    stored_bytes: int
    memory: int
    full_share: float
    layout: str
    idle_codec: str
    calibrated: str | None
    live_gate: tuple[str, ...] = ()
    tool_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Advice:
    """One setting, its value in TOML, and why; ``setting`` is ``None`` for something to look into."""

    setting: str | None
    value: str
    why: str


def advise(seen: Observed) -> list[Advice]:
    """What would serve better than what is set; empty where nothing would."""
    return [*_policy(seen), *_layout(seen), *_codec(seen), *_budgets(seen)]


def _policy(seen: Observed) -> Iterator[Advice]:
    median, most, longest = seen.lengths
    if seen.sessions < _FEW or seen.full_share == 0 or most < _SHORT_OF_LIMIT * seen.context:
        return
    window = max(1024, min(seen.context // 2, 2 ** (max(median, 1)).bit_length()))
    kind = window_kind(seen.tool_share)
    first = f"old tool results first, which are {seen.tool_share:.0%} of all" if kind == "turns" else "the oldest first"
    yield Advice(
        "default_policy",
        f'"{kind}:{window}"',
        f"the longest conversations have {longest:,} tokens and the model ends at {seen.context:,}: under `full` they "
        f"stop there; this keeps system prompt and tools and drops {first}. `adaptive` decides it for each session, "
        f"once it does not fit any more",
    )


def _layout(seen: Observed) -> Iterator[Advice]:
    working = seen.together * seen.lengths[1] * seen.token_bytes
    if seen.together < 2 or working <= seen.device_budget:
        return
    name = next((n for n in seen.live_gate if n != seen.layout), None)
    need = f"{seen.together} sessions at a time, {seen.lengths[1]:,} tokens each, want {working:,} bytes of live KV"
    if working > seen.device_budget and name is not None and not seen.layout.startswith("quantized"):
        yield Advice(
            "layout",
            f'"{name}"',
            f"{need}, device_budget is {seen.device_budget:,}: they drive each other out; in fewer bits more of them "
            "stay, and calibration found this layout inside max_kl",
        )
    elif seen.device_budget < 0.7 * seen.memory and working <= 0.8 * seen.memory:
        yield Advice("device_budget", f'"{working}"', f"{need}, and the machine has {seen.memory:,}")


def _codec(seen: Observed) -> Iterator[Advice]:
    if seen.idle_codec == "auto" and seen.calibrated is None and seen.sessions >= _FEW:
        yield Advice(
            "idle_codec",
            '"auto"',
            f"{seen.stored_bytes:,} bytes are stored; `agentkv calibrate` may find a codec inside max_kl that takes a "
            "fraction of that",
        )
    elif seen.idle_codec in ("raw", "exact") and seen.calibrated not in (None, "raw", "exact"):
        yield Advice(
            "idle_codec",
            '"auto"',
            f"by calibration {seen.calibrated} is inside max_kl for this model; {seen.idle_codec} is only needed where "
            "continuations must be the same token for token",
        )


def _budgets(seen: Observed) -> Iterator[Advice]:
    if seen.stored_bytes > 0.8 * seen.disk_budget:
        yield Advice(
            "disk_budget",
            f'"{2 * seen.stored_bytes}"',
            f"{seen.stored_bytes:,} of {seen.disk_budget:,} bytes are used: KV will soon not reach the disk, and be "
            "computed again",
        )
    resting = max(0, seen.sessions - seen.together) and seen.together * seen.lengths[1] * seen.token_bytes // 2
    if seen.gap is not None and seen.gap < 600 and resting > seen.host_budget and seen.host_budget < seen.memory // 4:
        yield Advice(
            "host_budget",
            f'"{min(seen.memory // 4, resting)}"',
            f"sessions pause {seen.gap:,.0f} s as a rule: in host memory they come back sooner than from disk",
        )
    if seen.hit_rate is not None and seen.hit_rate < USUAL_HIT_RATE:
        yield Advice(
            None,
            "",
            f"only {seen.hit_rate:.0%} of known tokens were reused, {USUAL_HIT_RATE:.0%} is usual: `agentkv doctor` "
            "and the `fallback` events say why stored KV is not used",
        )
