"""What a turn must find of its session's KV, read from the manifest before it begins."""

from __future__ import annotations

from dataclasses import dataclass

from soaking.oracle import Violation

from agentkv import AgentKV
from agentkv.types import RestoreReport
from managing.reference import Asked, Known
from managing.rows import Rows
from managing.trouble import Trouble

__all__ = ["Foreseen", "foreseen"]


@dataclass(frozen=True)
class Foreseen:
    """``held``: tokens of KV at the last commit. ``least``: those that can be had again; all of them if ``whole``."""

    held: int
    least: int
    whole: bool

    def check(self, one: Asked) -> None:
        """The reply, or the report, says that so much was reused, and why not more."""
        report = one.value if isinstance(one.value, RestoreReport) else one.reply.restore if one.reply else None
        if report is None:
            return
        wrong = []
        if self.whole and (report.reason is not None or report.recomputed_tokens):
            wrong.append("nothing was lost")
        if not self.whole and not (report.reason or "").startswith(("unstored: ", "missing: nothing was stored")):
            wrong.append("it had not been stored")
        if one.reply is not None and one.reply.usage.cached_tokens != self.held and self.whole:
            wrong.append(f"{self.held} tokens were held, {one.reply.usage.cached_tokens} reused")
        if report.recompute != "retained" and report.tokens < self.least:
            wrong.append(f"{self.least} tokens can be had")
        if wrong:
            raise Violation(f"{one.what} of {one.known.id}: {', '.join(wrong)}: {report}")


def foreseen(kv: AgentKV, known: Known, rows: Rows, trouble: Trouble) -> Foreseen | None:
    """``None`` where it cannot be told: a file is damaged, or there is no KV yet."""
    row, manifest = rows.sessions()[known.id], rows.manifest(known.id)
    core = kv.sessions._cores.get(known.id)
    names = {segment.chunk_id for segment in manifest.segments}
    if row.kv_length == 0 or names & trouble.damaged.keys():
        return None
    held = row.held.tokens
    if core is not None and core.kv is not None:
        return Foreseen(held, held, True) if core.kv.length == row.kv_length else None
    if (core is not None and core.unsaved is not None) or manifest.length >= row.kv_length:
        return Foreseen(held, held, True)
    points = [point for point in manifest.resume_points if point.position <= manifest.length]
    return Foreseen(held, max((point.held.tokens for point in points), default=0), False)
