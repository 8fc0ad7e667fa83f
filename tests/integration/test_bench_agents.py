"""`agentkv bench agents`: each figure against a count of its own, on a tiny model."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from homes import chat_folder, written
from homes import opened as opened_home
from typer.testing import CliRunner

from agentkv import AgentKV
from agentkv.bench.agents import SessionServer, Work, measured, prepared
from agentkv.bench.serving import Answer, serve
from agentkv.bench.stateless import Stateless, ledger_lengths
from agentkv.bench.traffic import Conversation, Traffic, Turn
from agentkv.cli.main import app
from agentkv.errors import InvalidRequest
from agentkv.sessions.db.records import TurnRecord

CONTEXT = 8192
TRAFFIC = Traffic(
    sessions=8, turns=3, kinds=2, head_tokens=100, result_median_tokens=40, result_most_tokens=120, answer_tokens=6,
    compression=10_000,
)  # fmt: skip
TURNS = TRAFFIC.sessions * TRAFFIC.turns


def opened(home: Path, model: Path, **settings: Any) -> AgentKV:
    """As the benchmark opens it: results are made up, and answer no call that this model makes."""
    return opened_home(home, model, tool_format="text", **settings)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = chat_folder(tmp_path_factory.mktemp("models"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    return folder


@pytest.fixture(scope="module")
def work(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Work:
    async def prepare() -> Work:
        async with opened(tmp_path_factory.mktemp("home"), model) as kv:
            return prepared(kv, TRAFFIC, None, 4)

    return asyncio.run(prepare())


class Watched(SessionServer):
    """The real one; it remembers its agents and how many turns ran at once."""

    def __init__(self, kv: AgentKV, **options: Any) -> None:
        super().__init__(kv, **options)
        self.agents: list[Any] = []
        self.most = self.now = 0

    def agent(self, conversation: Conversation) -> Any:  # type: ignore[override]
        real, server = super().agent(conversation), self
        self.agents.append(real)

        class Counting:
            async def pause(self, seconds: float) -> None:
                await real.pause(seconds)

            async def turn(self, turn: Turn) -> Answer:
                server.now += 1
                server.most = max(server.most, server.now)
                try:
                    return await real.turn(turn)
                finally:
                    server.now -= 1

        return Counting()


# -- what is counted ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    """The same traffic on sessions, then on a server without them, and what is found there afterwards.

    ``turns``: the database's, those that generated. ``live``, ``held``, ``files``: bytes of live KV, of chunks in host
    memory and of chunk files. ``scratch_ledgers``: the conversations as the other server's agents hold them.
    """

    ours: dict[str, Any]
    theirs: dict[str, Any]
    turns: list[TurnRecord]
    ledgers: list[list[int]]
    scratch_ledgers: list[list[int]]
    live: int
    held: int
    files: int
    left: int


@pytest.fixture(scope="module")
def ran(model: Path, work: Work, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    home = tmp_path_factory.mktemp("ran")

    async def run() -> Ran:
        async with opened(home, model, device_budget=2 * work.budget) as kv:
            server = Watched(kv)
            ours = await measured(kv, server, work, TRAFFIC.in_flight)
            await written(kv)
            sessions = [agent._session for agent in server.agents]
            turns = [turn for s in sessions for turn in await kv.sessions.repository.turns(s.id) if turn.kind == "send"]
            ledgers = [await s.token_ids() for s in sessions]
            cores = kv.sessions.cores()
            live = sum(core.kv.nbytes for core in cores if core.kv is not None)
            held = {name: nbytes for core in cores for name, nbytes in core.held.items()}
            files = sum(path.stat().st_size for path in (home / "blobs").rglob("*") if path.is_file())

            stateless, kept = Stateless(kv.model), []
            make = stateless.agent
            stateless.agent = lambda conversation: kept.append(make(conversation)) or kept[-1]  # type: ignore
            theirs = await measured(kv, stateless, work, TRAFFIC.in_flight)
            scratch = [list(agent._rendered.ids) for agent in kept]
            left = len(stateless.states)
            return Ran(ours, theirs, turns, ledgers, scratch, live, sum(held.values()), files, left)

    return asyncio.run(run())


def test_every_turn_is_answered(ran: Ran) -> None:
    for figures in (ran.ours, ran.theirs):
        assert (figures["turns"], figures["errors"], figures["fallbacks"]) == (TURNS, 0, {}), figures
        assert figures["completion_tokens"] == TURNS * TRAFFIC.answer_tokens
        assert 0 < figures["ttft_p50_s"] <= figures["ttft_p95_s"] <= figures["ttft_sum_s"]
    assert len(ran.turns) == TURNS


def test_reuse_is_what_database_and_engine_say(ran: Ran) -> None:
    ours, turns = ran.ours, ran.turns
    assert ours["known_tokens"] == sum(turn.span.start for turn in turns)
    assert ours["reused_tokens"] == sum(turn.cached_tokens for turn in turns)
    assert ours["reused_share"] == ours["reused_tokens"] / ours["known_tokens"] > 0.5
    # All else was computed, and nothing twice: the last generated token of a turn is fed by the next.
    assert ours["computed_tokens"] == sum(t.prompt_tokens - t.cached_tokens + t.completion_tokens - 1 for t in turns)
    assert ours["heads_computed"] == sum(not turn.cached_tokens for turn in turns) >= TRAFFIC.kinds


def test_restores_are_those_of_the_turns_and_pressure_moved_sessions(ran: Ran) -> None:
    sources = Counter(turn.restore["source"] for turn in ran.turns if turn.restore)
    assert ran.ours["restores"] == sources
    assert sources["host"] + sources["disk"] > 0


def test_bytes_are_those_of_the_tiers(ran: Ran, work: Work) -> None:
    peak = ran.ours["bytes_by_tier"]
    assert ran.files <= peak["disk"] <= 1.3 * ran.files
    assert 0 < ran.live <= peak["device"] <= 2 * work.budget
    assert 0 < ran.held <= peak["host"] <= ran.files


def test_the_budget_is_that_of_the_longest_ledger(ran: Ran, work: Work, model: Path, tmp_path: Path) -> None:
    # The model may end an answer with what the template would have written behind it.
    assert work.longest - TRAFFIC.turns <= max(map(len, ran.ledgers)) <= work.longest
    member = json.loads((model / "config.json").read_text())
    heads, dim = member["num_key_value_heads"], member["head_dim"]
    a_token = 2 * member["num_hidden_layers"] * heads * dim * 4  # keys and values, float32
    assert 4 * work.longest * a_token <= work.budget <= 4 * (work.longest + 64) * a_token


def test_a_server_without_sessions_says_the_same_and_computes_everything(ran: Ran, work: Work) -> None:
    ours, theirs = ran.ours, ran.theirs
    assert ran.scratch_ledgers == ran.ledgers
    assert (theirs["reused_share"], theirs["restores"]) == (0.0, {"scratch": TURNS})
    same = ("turns", "errors", "known_tokens", "prompt_tokens", "completion_tokens")
    assert [theirs[name] for name in same] == [ours[name] for name in same]
    assert theirs["computed_tokens"] == theirs["prompt_tokens"] + theirs["completion_tokens"] - TURNS
    assert theirs["computed_tokens"] > 2 * ours["computed_tokens"]
    assert 0 < theirs["bytes_by_tier"]["device"] <= work.budget
    assert ran.left == 0


async def test_memory_for_all_means_that_nothing_is_restored(model: Path, work: Work, tmp_path: Path) -> None:
    async with opened(tmp_path, model, device_budget=20 * work.budget) as kv:
        figures = await measured(kv, SessionServer(kv), work, TRAFFIC.in_flight)
    later = TURNS - TRAFFIC.sessions
    assert figures["restores"]["device"] == later and "host" not in figures["restores"]
    assert figures["bytes_by_tier"]["host"] == 0


# -- places and waiting ------------------------------------------------------------------------------------------------


async def test_no_more_turns_at_a_time_than_there_are_places(model: Path, work: Work, tmp_path: Path) -> None:
    async with opened(tmp_path, model) as kv:
        one, three = Watched(kv), Watched(kv)
        alone = await measured(kv, one, work, 1)
        await measured(kv, three, work, 3)
    assert (one.most, three.most) == (1, 3)
    # Waiting for the place is no part of the first token's time: that of all turns fits into the whole.
    assert alone["ttft_sum_s"] < alone["total_s"]
    assert alone["queue_p50_s"] > alone["ttft_p50_s"] > 0


async def test_a_gap_is_waited_for(model: Path, work: Work, tmp_path: Path) -> None:
    one = work.conversations[0]
    slow = replace(one, turns=tuple(replace(turn, gap_seconds=0.4) for turn in one.turns))
    async with opened(tmp_path, model) as kv:
        served = await serve(SessionServer(kv), [slow], 1)
    assert len(served.answers) == TRAFFIC.turns
    assert served.seconds > 0.4 * TRAFFIC.turns


async def test_refused_turns_are_errors_not_answers(model: Path, work: Work, tmp_path: Path) -> None:
    async with opened(tmp_path, model, device_budget=1000) as kv:
        served = await serve(SessionServer(kv), work.conversations[:2], 2)
    assert served.answers == [] and served.queued == []
    assert served.errors == {"CapacityExceeded": 2 * TRAFFIC.turns}
    assert served.figures()["errors"] == 2 * TRAFFIC.turns


async def test_agents_with_hints_announce_every_wait_behind_their_first_turn(
    model: Path, work: Work, tmp_path: Path
) -> None:
    paused = [
        replace(c, usual_gap=2.0, turns=tuple(replace(turn, gap_seconds=0.1) for turn in c.turns))
        for c in work.conversations[:3]
    ]
    async with opened(tmp_path, model) as kv:
        server = Watched(kv, hints=True)
        serving = asyncio.create_task(serve(server, paused, 3))
        announced = 0.0
        while not serving.done():
            now = time.monotonic()
            announced = max([announced, *((c.expected_at or now) - now for c in kv.sessions.cores())])
            await asyncio.sleep(0.005)
        served = await serving
        assert not served.errors and len(served.answers) == 3 * TRAFFIC.turns
        assert server.outcomes == {"accepted": 3 * (TRAFFIC.turns - 1)}
        assert 1.5 < announced <= 2.0
        quiet = SessionServer(kv)
        await serve(quiet, paused[:1], 1)
        assert not quiet.outcomes


# -- traffic for a model -----------------------------------------------------------------------------------------------


async def test_traffic_longer_than_the_context_is_refused(model: Path, tmp_path: Path) -> None:
    async with opened(tmp_path, model) as kv:
        with pytest.raises(InvalidRequest, match="fewer turns"):
            prepared(kv, replace(TRAFFIC, turns=200), None, 4)


async def test_transcripts_end_where_the_context_does(model: Path, tmp_path: Path) -> None:
    said = [{"role": "user", "content": "x y " * 800}, {"role": "assistant", "content": "I see."}]
    (tmp_path / "long.json").write_text(json.dumps({"messages": said * 5}))
    async with opened(tmp_path / "home", model, prefill_tokens=512) as kv:
        (one,) = prepared(kv, Traffic(sessions=1, turns=9, compression=1e6), tmp_path, 1).conversations
        assert 0 < len(one.turns) < 5
        lengths = ledger_lengths(kv.model.tokenizer, replace(one, turns=(*one.turns, one.turns[-1])))
        assert lengths[-2] <= CONTEXT < lengths[-1]
        served = await serve(SessionServer(kv), [one], 1)
        assert len(served.answers) == len(one.turns) and not served.errors


async def test_recorded_tool_calls_are_answered(model: Path, tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    said = [
        {"role": "system", "content": "You fix bugs."},
        {"role": "user", "content": "Fix it."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "a.py"},
        {"role": "assistant", "content": "Done."},
    ]
    (tmp_path / "calls.json").write_text(json.dumps(said))
    async with opened(tmp_path / "home", model) as kv:
        work = prepared(kv, Traffic(sessions=2, compression=1e6), tmp_path, 4)
        server = Watched(kv)
        served = await serve(server, work.conversations, 2)
        assert len(served.answers) == 4 and not served.errors
        kinds = [item.kind for item in await server.agents[0]._session.items()]
    assert kinds == ["message", "message", "message", "tool_result", "message"]


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_compares_both_on_one_line_of_json(model: Path, tmp_path: Path) -> None:
    arguments = ["bench", "agents", "--model", str(model), "--home", str(tmp_path), "--dtype", "float32", "--json"]
    ran = CliRunner().invoke(
        app,
        [
            *arguments,
            "--quick",
            "--sessions",
            "6",
            "--compare",
            "--compression",
            "10000",
            "--seed",
            "3",
        ],
    )
    assert ran.exit_code == 0, ran.output
    said = json.loads(ran.stdout.splitlines()[-1])
    assert (said["traffic"]["seed"], said["traffic"]["sessions"], said["traffic"]["turns"]) == (3, 6, 3)
    assert (said["turns"], said["errors"], said["no_reuse"]["turns"]) == (18, 0, 18), said
    assert said["reused_share"] > 0.5 and said["no_reuse"]["reused_share"] == 0
    assert said["ratio_ttft_p50"] == pytest.approx(said["no_reuse"]["ttft_p50_s"] / said["ttft_p50_s"])
    assert said["no_reuse"]["computed_tokens"] > 2 * said["computed_tokens"]
    assert 0 < said["ttft_p50_s"] <= said["ttft_p95_s"] < said["total_s"]
    assert said["bytes_by_tier"]["device"] <= said["device_budget_bytes"]
    assert all(math.isfinite(value) for value in said.values() if isinstance(value, float))


@pytest.mark.full
def test_all_policies_serve_the_same_traffic(model: Path, tmp_path: Path) -> None:
    arguments = ["bench", "agents", "--model", str(model), "--home", str(tmp_path), "--dtype", "float32", "--json"]
    few = ["--sessions", "5", "--turns", "2", "--kinds", "1", "--compression", "10000"]
    ran = CliRunner().invoke(app, [*arguments, *few, "--residency", "all"])
    assert ran.exit_code == 0, ran.output
    policies = json.loads(ran.stdout.splitlines()[-1])["policies"]
    assert list(policies) == ["lru", "lfu", "ttl", "cost"]
    for name, figures in policies.items():
        assert (figures["turns"], figures["errors"], figures["residency"]) == (10, 0, name), figures
    assert len({(f["prompt_tokens"], f["known_tokens"]) for f in policies.values()}) == 1
    refused = CliRunner().invoke(app, [*arguments, *few, "--residency", "lru", "--no-reuse"])
    assert refused.exit_code == 1 and "residency" in refused.output
    unknown = CliRunner().invoke(app, [*arguments, *few, "--residency", "mru"])
    assert unknown.exit_code == 1 and "mru" in unknown.output
