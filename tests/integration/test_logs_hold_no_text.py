"""What the log says of sessions, and what it must never say: nothing of what they were told, said, or hold."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from homes import chat_folder, opened, written
from typer.testing import CliRunner

from agentkv import AgentKV
from agentkv.cli.main import app
from agentkv.engine.detokenize import Delta, TextStream
from agentkv.errors import EngineFailed, InvalidRequest, SessionBusy, TemplateError
from agentkv.logs import JsonFormatter, TextFormatter
from agentkv.policies.retention import RETENTION, RetentionPolicy, SessionView
from agentkv.sessions.events import LifecycleEvent
from agentkv.storage.local import LocalBlobs
from agentkv.types import Span

MARK = "zqxjkvbp"
"""In every text of these tests' conversations, and in every error that quotes one."""
SYSTEM = f"You are {MARK}-sys."
QUESTION = f"Who is {MARK}-user?"
RESULT = f"sunny {MARK}-result"
TOOL = {
    "type": "function",
    "function": {
        "name": f"{MARK}_tool",
        "description": f"Asks {MARK}-description.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": f"{MARK}_tool", "arguments": f'{{"city": "{MARK}-city"}}'}}
REFUSAL = f"no {MARK}-refused"


@dataclass(frozen=True)
class Talkative(RetentionPolicy):
    """A third party's policy whose error quotes what it saw."""

    name = "talkative"
    raises: ClassVar[bool] = False
    window: int = 64

    def keep(self, view: SessionView) -> tuple[Span, ...]:
        item = view.items[-1]
        if type(self).raises and item.role == "assistant" and view.length > item.span.start + 30:
            raise ValueError(f"cannot keep {MARK}")
        last = Span(view.length - 32, view.length)
        return tuple(span for have in view.retained if len(span := have.intersect(last)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its template refuses some messages, quoting them."""
    folder = chat_folder(tmp_path_factory.mktemp("models"))
    template = folder / "chat_template.jinja"
    refusal = "{% if messages[-1]['content'][:2] == 'no' %}{{ raise_exception(messages[-1]['content']) }}{% endif %}"
    template.write_text(refusal + template.read_text())
    return folder


def damaged(kv: AgentKV) -> None:
    """Every file of stored KV is."""
    for name, _ in list(kv.sessions.tiers.blobs.list()):
        path = kv.settings.blobs_dir / name[:2] / name
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)


async def a_day(kv: AgentKV) -> list[list[int]]:
    """Turns, tools, restores, faults, refusals, cancellations. The ledgers."""
    blobs = kv.sessions.tiers.blobs
    assert isinstance(blobs, LocalBlobs)
    session = await kv.sessions.create(system=SYSTEM, tools=[TOOL], agent_id="scout")
    await session.append(
        [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    )
    await session.send({"role": "tool", "tool_call_id": "c1", "content": RESULT}, max_tokens=4, stop=MARK)
    async for _ in session.stream(QUESTION, max_tokens=4):
        pass
    assert (await session.suspend("host")).tier == "host"
    assert (await session.send(QUESTION, max_tokens=4)).restore.source == "host"
    await session.suspend()
    damaged(kv)
    assert (await session.send(QUESTION, max_tokens=4)).restore.reason

    with pytest.raises(TemplateError, match=MARK):
        await session.send(REFUSAL, max_tokens=1)
    with pytest.raises(InvalidRequest):
        await session.send([{"role": MARK, "content": MARK}], max_tokens=1)
    running = asyncio.create_task(session.send(QUESTION, max_tokens=100, ignore_eos=True))
    await asyncio.sleep(0.05)
    with pytest.raises(SessionBusy):
        await session.send(QUESTION, max_tokens=1)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    async with contextlib.aclosing(session.stream(QUESTION, max_tokens=100, ignore_eos=True)) as events:
        async for _ in events:
            break

    with pytest.MonkeyPatch.context() as patch:

        def push(self: TextStream, token: int) -> Delta:
            raise ValueError(f"cannot decode {MARK}")

        patch.setattr(TextStream, "push", push)
        with pytest.raises(EngineFailed, match=MARK):
            await session.send(QUESTION, max_tokens=4)
    with pytest.MonkeyPatch.context() as patch:

        def plan(slots: object) -> object:
            raise RuntimeError(f"no kernel for {MARK}")

        patch.setattr(kv.model.layout, "plan", plan)
        with pytest.raises(EngineFailed, match=MARK):
            await session.send(QUESTION, max_tokens=4)

    RETENTION._known["talkative"] = Talkative
    fickle = await kv.sessions.create(policy=Talkative())
    await fickle.send(QUESTION * 3, max_tokens=8, ignore_eos=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Talkative, "raises", True)
        with pytest.raises(InvalidRequest, match=MARK):
            await fickle.send(QUESTION * 3, max_tokens=100, ignore_eos=True)

    await written(kv)
    budget, blobs.budget_bytes = blobs.budget_bytes, 100
    await session.send(QUESTION, max_tokens=4)
    await written(kv)
    blobs.budget_bytes = budget
    await session.send(QUESTION, max_tokens=4)
    await written(kv)
    ledgers = [await s.token_ids() for s in (session, fickle)]
    await fickle.delete()
    return ledgers


@dataclass(frozen=True)
class Day:
    """The log at its lowest level, the events, and the ledgers that came of it."""

    records: list[logging.LogRecord]
    events: list[LifecycleEvent]
    ledgers: list[list[int]]


class Kept(logging.Handler):
    """Keeps records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


async def lived(home: Path, model: Path) -> tuple[list[LifecycleEvent], list[list[int]]]:
    """A day, and the morning after it."""
    seen: list[LifecycleEvent] = []

    async def watch(kv: AgentKV) -> None:
        seen.extend([event async for event in kv.events()])

    async with opened(home, model) as kv:
        watcher = asyncio.create_task(watch(kv))
        await asyncio.sleep(0)
        ledgers = await a_day(kv)
    await watcher
    async with opened(home, model) as kv:
        (record,) = await kv.sessions.list()
        assert MARK in kv.model.tokenizer.decode(ledgers[0]), "the marks are really there"
        session = await kv.sessions.get(record.id)
        assert (await session.send(QUESTION, max_tokens=4)).restore.source == "disk"
    return seen, ledgers


@pytest.fixture(scope="module")
def day(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Day:
    logger, kept = logging.getLogger("agentkv"), Kept()
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(kept)
    try:
        seen, ledgers = asyncio.run(lived(tmp_path_factory.mktemp("home"), model))
    finally:
        logger.setLevel(level)
        logger.removeHandler(kept)
        RETENTION._known.pop("talkative", None)
    return Day(kept.records, seen, ledgers)


def test_no_record_at_any_level_holds_anything_of_a_conversation(day: Day) -> None:
    records = day.records
    assert {"token_not_handed_out", "step_failed", "room_not_made", "fallback"} <= {
        r.__dict__["event"] for r in records
    }
    for record in records:
        whole = " ".join([JsonFormatter().format(record), TextFormatter().format(record), repr(record.__dict__)])
        assert MARK not in whole, record.getMessage()
        assert not record.exc_info and not record.exc_text, "a traceback quotes"
        for ids in day.ledgers:
            assert str(ids[5:8])[1:-1] not in whole, record.getMessage()


def test_each_event_is_one_line_with_its_fields(day: Day) -> None:
    for record in day.records:
        text, as_json = TextFormatter().format(record), JsonFormatter().format(record)
        assert len(text.splitlines()) == len(as_json.splitlines()) == 1
        found = json.loads(as_json)
        assert text.startswith(f"{found['time']} {found['level']} {found['logger']} {found['event']}")
        assert {name: value for name, value in found.items() if name not in ("time", "level", "logger", "event")} == (
            record.__dict__["fields"]
        )


def test_what_happens_to_sessions_is_logged_once_each_at_a_level_that_says_how_bad_it_is(day: Day) -> None:
    events = day.events
    told = [record for record in day.records if record.name == "agentkv.events"][: len(events)]
    assert [(r.__dict__["event"], r.__dict__["fields"].get("session")) for r in told] == [
        (event.kind, event.session_id) for event in events
    ]
    for record, event in zip(told, events, strict=True):
        assert record.__dict__["fields"].items() >= {k: v for k, v in event.details.items() if v is not None}.items()
    levels = {record.__dict__["event"]: record.levelname for record in told}
    assert levels == {
        "created": "INFO",
        "restored": "INFO",
        "demoted": "INFO",
        "evicted": "INFO",
        "deleted": "INFO",
        "storage_ok": "INFO",
        "fallback": "WARNING",
        "storage_full": "ERROR",
    }
    counts = Counter(record.__dict__["event"] for record in told)
    assert (counts["created"], counts["demoted"], counts["storage_full"], counts["storage_ok"]) == (2, 2, 1, 1)


async def test_a_reader_that_is_too_slow_is_logged(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tmp_path / "home", model) as kv:
        events = kv.events()
        first = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        caplog.clear()
        for _ in range(1100):
            kv.sessions.tiers.observer.events.emit("deleted", "sess_x")
        assert (await first).kind == "lost"
        assert [record.getMessage() for record in caplog.records] == ["lost events=76"]
        await events.aclose()  # type: ignore[attr-defined]


@pytest.fixture
def unconfigured() -> Iterator[None]:
    """What a command configures is for its process: here it is taken back."""
    logger = logging.getLogger("agentkv")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.usefixtures("unconfigured")
def test_the_command_line_logs_to_standard_error_as_it_is_told_to_and_no_prompt(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_format: str
) -> None:
    monkeypatch.setenv("AGENTKV_DISK_MARGIN", "0")
    monkeypatch.setenv("AGENTKV_LOG_FORMAT", log_format)
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's own: as in a process that nobody has configured
    options = ["chat", "--home", str(tmp_path / "home"), "--model", str(model), "--device", "cpu", "--max-tokens", "4"]
    logs = []
    for debug in ([], ["--debug"]):
        done = CliRunner().invoke(app, [*debug, *options, "--system", SYSTEM], input=f"{QUESTION}\n")
        assert done.exit_code == 0, done.output
        assert MARK not in done.stderr
        logs.append([line for line in done.stderr.splitlines() if "agentkv." in line])
    assert logs[0] == [], "nothing went wrong, nothing is said"
    if log_format == "json":
        found = next(said for line in logs[1] if (said := json.loads(line))["event"] == "created")
        assert (found["level"], found["logger"], found["session"][:5]) == ("info", "agentkv.events", "sess_")
    else:
        assert any(" info agentkv.events created session=sess_" in line for line in logs[1])
