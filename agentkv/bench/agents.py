"""Many agents, memory for a few: first tokens under agent-like traffic, and what it was that did not need computing."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from agentkv.bench.against import Remote
from agentkv.bench.serving import Answer, Server, serve
from agentkv.bench.setup import machine, open_runtime, text_ids
from agentkv.bench.stateless import Stateless, ledger_lengths
from agentkv.bench.traffic import Conversation, Traffic, Turn, written
from agentkv.bench.transcripts import read_transcripts, replayed
from agentkv.engine.texts import documentation, encoded
from agentkv.errors import InvalidRequest
from agentkv.policies.residency import parse_residency
from agentkv.sessions.runtime import AgentKV
from agentkv.sessions.session import Session

__all__ = ["SessionServer", "Work", "bench_agents", "measured", "prepared"]


_POLICIES = ("lru", "lfu", "ttl", "cost")


@dataclass(frozen=True, slots=True)
class Work:
    """Traffic for one model. ``longest``: tokens of the longest ledger it leads to; ``budget``: bytes of live KV."""

    conversations: list[Conversation]
    longest: int
    budget: int


class SessionServer:
    """agentkv itself, through its public interface: one session an agent.

    ``hints``: agents say how long their tools usually take; how long they take this time they do not know.
    """

    def __init__(self, kv: AgentKV, *, hints: bool = False) -> None:
        self.kv = kv
        self._hints = hints
        self.outcomes: Counter[str] = Counter()

    def agent(self, conversation: Conversation) -> _Agent:
        """Somebody with a session of its own."""
        return _Agent(self.kv, conversation, self.outcomes if self._hints else None)

    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes now: reserved on the device, encoded in host memory and on disk."""
        tiers = self.kv.sessions.tiers
        return {"device": tiers.device_bytes, "host": tiers.host.used_bytes, "disk": tiers.blobs.used_bytes()}


class _Agent:
    def __init__(self, kv: AgentKV, conversation: Conversation, outcomes: Counter[str] | None) -> None:
        self._kv = kv
        self._outcomes = outcomes
        self._conversation = conversation
        self._session: Session | None = None
        self._known = 0

    async def pause(self, seconds: float) -> None:
        if self._session is None or self._outcomes is None:
            await asyncio.sleep(seconds)
            return
        async with self._session.tool_wait(expected=self._conversation.usual_gap) as outcome:
            self._outcomes[outcome.outcome] += 1
            await asyncio.sleep(seconds)

    async def turn(self, turn: Turn) -> Answer:
        started, creating = time.perf_counter(), 0.0
        if self._session is None:
            c = self._conversation
            tools = c.tools or None
            self._session = await self._kv.sessions.create(c.system, tools=tools, agent_id=c.kind, policy="full")
            creating = time.perf_counter() - started
            self._known = len(await self._session.token_ids())
        known = self._known
        reply = await self._session.send(list(turn.messages), max_tokens=turn.answer_tokens, ignore_eos=True)
        usage, restore = reply.usage, reply.restore
        self._known = usage.total_tokens
        reason = restore.reason.split(":")[0] if restore.reason else None
        return Answer(
            creating + reply.ttft_seconds,
            known,
            usage.cached_tokens,
            usage.prompt_tokens,
            usage.completion_tokens,
            restore.source,
            reason,
        )


def prepared(kv: AgentKV, traffic: Traffic, traces: Path | None, device_budget: float) -> Work:
    """The traffic in this model's words, and ``device_budget`` sessions' worth of bytes. Blocking.

    Transcripts end where the model's context does. ``InvalidRequest`` for made traffic that does not fit.
    """
    model = kv.model
    tokenizer, limit = model.tokenizer, model.context_limit
    if tokenizer is None or not tokenizer.chat_template:
        raise InvalidRequest(f"{model.name} has no chat template: these agents talk in messages", param="model")
    if traces is None:
        ids = encoded(documentation(), tokenizer)

        def text(place: int, tokens: int) -> str:
            at = place % max(1, len(ids) - tokens)
            return str(tokenizer.decode(ids[at : at + tokens]))

        conversations = written(traffic, text)
    else:
        conversations = replayed(
            read_transcripts(traces), traffic, lambda said: len(tokenizer.encode(said, add_special_tokens=False))
        )
    fitting, longest = [], 0
    for conversation in conversations:
        lengths = ledger_lengths(tokenizer, conversation)
        fit = sum(length <= limit for length in lengths)
        if traces is None and fit < len(lengths):
            raise InvalidRequest(
                f"a conversation would grow to {lengths[-1]:,} tokens, and the model's context is {limit:,}: "
                "ask for fewer turns",
                param="turns",
            )
        if fit:
            fitting.append(replace(conversation, turns=conversation.turns[:fit]))
            longest = max(longest, lengths[fit - 1])
    if not fitting:
        raise InvalidRequest(f"no transcript in {traces} begins within {limit:,} tokens of context", param="traces")
    return Work(fitting, longest, int(device_budget * model.layout.bytes_needed(None, longest, limit)))


async def measured(kv: AgentKV, server: Server, work: Work, in_flight: int) -> dict[str, Any]:
    """Serve the traffic, after a session of other text: what only the first request pays is paid. Its figures."""
    warm = await kv.sessions.create()
    await warm.generate_tokens(text_ids(kv, 300, seed=1), max_tokens=8, ignore_eos=True)
    await warm.delete()
    engine = kv.model.engine
    before = engine.computed_tokens
    served = await serve(server, work.conversations, in_flight)
    computed = engine.computed_tokens - before
    await kv.flush()
    served.look(server)
    return {**served.figures(), "computed_tokens": computed}


async def bench_agents(
    traffic: Traffic,
    traces: Path | None,
    device_budget: float,
    model: str,
    home: Path | None,
    *,
    servers: Literal["sessions", "scratch", "both"] = "sessions",
    residency: str | None = None,
    hints: bool = False,
    against: tuple[str, str | None, str | None] | None = None,
    dtype: str = "bfloat16",
    threads: int | None = None,
) -> dict[str, Any]:
    """``servers``: agentkv's sessions, a server that computes every turn from scratch, or one after the other on the
    same traffic, with ratios. ``residency``: the policy by which sessions leave the device, or ``all``: sessions under
    each of agentkv's own, one after the other. ``hints``: agents announce their tools' waits. ``against``: URL, model
    and key of a server that is given the same traffic afterwards, with ratios.

    Each run has a runtime and a temporary home of its own; sessions leave the device by pressure alone.
    """
    if residency is not None and servers != "sessions":
        raise InvalidRequest(
            "residency policies are compared with each other: ask for no other server", param="residency"
        )
    if against is not None and residency == "all":
        raise InvalidRequest("another server has no residency policies: leave one of the two out", param="against")
    if residency not in (None, "all"):
        parse_residency(residency)
    settings: dict[str, Any] = {"dtype": dtype, "threads": threads, "idle_seconds": 3600, "disk_seconds": 7200}
    settings["tool_format"] = "text"  # the results are made up beforehand, and answer no call of this model's
    async with open_runtime(model, home, **settings) as (kv, _):
        work = await asyncio.to_thread(prepared, kv, traffic, traces, device_budget)

    async def run(stateless: bool = False, **more: Any) -> dict[str, Any]:
        async with open_runtime(model, home, device_budget=work.budget, **settings, **more) as (kv, _):
            sessions = SessionServer(kv, hints=hints)
            figures = await measured(kv, Stateless(kv.model) if stateless else sessions, work, traffic.in_flight)
            if not stateless:
                figures["residency"] = kv.settings.residency
                figures["hints"] = dict(sessions.outcomes)
            return {**figures, **machine(kv)}

    result: dict[str, Any] = {
        "bench": "agents",
        "model": model,
        "dtype": dtype,
        "traffic": asdict(traffic),
        "traces": None if traces is None else str(traces),
        "sessions": len(work.conversations),
        "longest_tokens": work.longest,
        "device_budget_sessions": device_budget,
        "device_budget_bytes": work.budget,
        "reuse": servers != "scratch",
    }
    if residency == "all":
        return {**result, "policies": {name: await run(residency=name) for name in _POLICIES}}
    chosen = {} if residency is None else {"residency": residency}
    result |= {**chosen, **await run(servers == "scratch", **chosen)}
    if servers == "both":
        scratch = await run(True)
        result["no_reuse"] = scratch
        for name in ("ttft_p50", "ttft_p95", "total"):
            result[f"ratio_{name}"] = scratch[f"{name}_s"] / result[f"{name}_s"]
    if against is not None:
        async with Remote.connected(*against) as remote:
            served = await serve(remote, work.conversations, traffic.in_flight)
            result["against"] = {"url": against[0], "model": remote.model, **served.figures()}
        for name in ("ttft_p50", "ttft_p95", "total"):
            result[f"against_ratio_{name}"] = result["against"][f"{name}_s"] / result[f"{name}_s"]
    return result
