"""Faults that users of systems like this one reported: here each is provoked, and does not happen.

``docs/reliability.md`` maps every such fault to its test; these are the ones that no other file is about.
"""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import threading
from array import array
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import CONTEXT, chat_folder, check_home, check_session, model_folder, opened, prompt, said, turns, written
from retaining import assert_equal_replies
from typer.testing import CliRunner

from agentkv import AgentKV, Session
from agentkv.cli.main import app
from agentkv.errors import StorageError, Unsupported
from agentkv.storage.local import LocalBlobs
from agentkv.types import SessionState

TOKENS = 8


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return model_folder(models, "gemma3")


async def undisturbed(home: Path, model: Path, inputs: list[list[int]], **create: Any) -> list[tuple[int, ...]]:
    """What a session says that nothing happens to."""
    async with opened(home, model) as kv:
        return [reply.ids for reply in await said(await kv.sessions.create(**create), inputs, TOKENS)]


def chunk_files(home: Path) -> list[Path]:
    return sorted((home / "blobs").glob("??/*"))


async def soon(what: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


# -- lost when it mattered ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
async def test_what_was_generated_is_stored_by_itself_and_really_used(
    models: Path, tmp_path: Path, family: str
) -> None:
    """4: users had to remember to call save. 5: only the KV of prompts was kept, that of generated tokens thrown away.
    15: a restore reported success and the next request prefilled everything, in models with sliding windows.

    The home is copied while its process goes on: what is in the copy is what that process would leave if it were
    killed now. Nobody has suspended, saved or closed anything."""
    model, home, copy = model_folder(models, family), tmp_path / "home", tmp_path / "copy"
    async with opened(home, model) as kv:
        session = await kv.sessions.create()
        await said(session, turns(2), max_tokens=60)
        await written(kv)
        shutil.copytree(home, copy, ignore=shutil.ignore_patterns("*.sock", "lock"))
        ledger = await session.token_ids()
        (twin,) = await said(session, [[5, 6, 7]], TOKENS)
    async with opened(copy, model) as kv:
        session, engine = await kv.sessions.get(session.id), kv.model.engine
        assert engine.computed_tokens == 0
        (reply,) = await said(session, [[5, 6, 7]], TOKENS)
        assert (reply.restore.source, reply.restore.reason, reply.ids) == ("disk", None, twin.ids)
        assert reply.usage.cached_tokens == len(ledger) - 1, "120 of them were generated"
        assert engine.computed_tokens == 1 + 3 + TOKENS - 1, "the last token, the new ones, what they led to"


# -- wrong content -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["static", "paged"])
async def test_a_slow_disk_stores_what_was_there_when_it_was_asked(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """9: KV was copied away while the session went on, and came back garbled.

    Encoding stands still until the session has taken another turn, evicted, and moved its windows in memory."""
    inputs, policy, options = turns(3), "sink:80", {"layout": layout}
    async with opened(tmp_path / "twin", model, **options) as kv:
        twin = await said(await kv.sessions.create(policy=policy), inputs, TOKENS, logprobs=1)
    home, go_on = tmp_path / "home", threading.Event()
    async with opened(home, model, **options) as kv:
        session = await kv.sessions.create(policy=policy)
        encode = kv.sessions.tiers.writer.encode

        def held_up(*args: Any) -> Any:
            assert go_on.wait(60)
            return encode(*args)

        monkeypatch.setattr(kv.sessions.tiers.writer, "encode", held_up)
        await said(session, inputs[:2], TOKENS)
        assert (await session.state()).stored_tokens == 0, "the disk has not had its turn yet"
        go_on.set()
        await written(kv)
        kept = (await session.state()).kept
        assert len(kept) == 2 and kept[1].start < 40, "some of the first turn's tokens are still needed"
    async with opened(home, model, **options) as kv:
        session = await kv.sessions.get(session.id)
        (reply,) = await said(session, inputs[2:], TOKENS, logprobs=1)
        assert (reply.restore.source, reply.restore.reason) == ("disk", None)
        assert_equal_replies(reply, twin[2])
        await check_session(kv, session)


@pytest.mark.parametrize("version", [1, 99], ids=["older", "newer"])
async def test_a_file_of_another_format_version_is_no_hit(model: Path, tmp_path: Path, version: int) -> None:
    """11: a cache in an old format was read as a hit."""
    home, inputs = tmp_path / "home", turns(3)
    twin = await undisturbed(tmp_path / "twin", model, inputs)
    async with opened(home, model) as kv:
        session = await kv.sessions.create()
        await said(session, inputs[:2], TOKENS)
    for path in chunk_files(home):
        data = path.read_bytes()
        path.write_bytes(data[:8] + version.to_bytes(4, "little") + data[12:])
    async with opened(home, model) as kv:
        (reply,) = await said(await kv.sessions.get(session.id), inputs[2:], TOKENS)
        assert reply.restore.reason is not None
        assert reply.restore.reason.startswith("version: ")
        assert (reply.usage.cached_tokens, reply.ids) == (0, twin[2])
        assert kv.stats().fallbacks == {"version": 1}


async def test_kv_that_is_one_token_off_its_ledger_is_not_resumed(model: Path, tmp_path: Path) -> None:
    """12: ledger and KV disagreed by one after a window shift, and the text looped.

    The live state is told that its tokens are those one place on, and is stored so: what is read back is compared with
    the ledger token by token."""
    home, inputs = tmp_path / "home", turns(3)
    twin = await undisturbed(tmp_path / "twin", model, inputs)
    async with opened(home, model) as kv:
        session = await kv.sessions.create()
        await said(session, inputs[:1], TOKENS)
        await written(kv)
        await said(session, inputs[1:2], TOKENS)
        ledger = await session.token_ids()
        state = session._core.kv
        assert state is not None
        await written(kv)
        await kv.sessions.repository.truncate_manifest(session.id, 0)
        session._core.stored = session._core.snapped = None
        state._ids = array("i", [*ledger[1 : state.length], 1])  # type: ignore[attr-defined]
        with pytest.raises(AssertionError):
            await check_session(kv, session)
        await session.suspend()
        (reply,) = await said(session, inputs[2:], TOKENS)
        assert reply.restore.reason is not None
        assert reply.restore.reason.startswith("tokens: ")
        assert (reply.usage.cached_tokens, reply.ids) == (0, twin[2])
        await check_session(kv, session)


async def test_files_that_vanish_leave_a_live_state_alone(model: Path, tmp_path: Path) -> None:
    """14: restoring a file that was missing wiped the state that was live."""
    home, inputs = tmp_path / "home", turns(4)
    twin = await undisturbed(tmp_path / "twin", model, inputs)
    async with opened(home, model) as kv:
        session = await kv.sessions.create()
        await said(session, inputs[:1], TOKENS)
        await written(kv)
        for path in chunk_files(home):
            path.unlink()
        assert (await session.resume()).source == "device"
        (reply,) = await said(session, inputs[1:2], TOKENS)
        assert (reply.restore.source, reply.restore.reason, reply.ids) == ("device", None, twin[1])
        assert reply.usage.cached_tokens == 40 + TOKENS - 1
        await session.suspend()
        replies = await said(session, inputs[2:], TOKENS)
        assert [r.ids for r in replies] == twin[2:]
        assert (replies[0].restore.reason or "").startswith("missing: ")
        assert replies[1].restore.reason is None


def adapter_folder(path: Path, base: Path | None) -> Path:
    """What peft saves: an adapter alone, or (``base``) beside the model that it was trained on."""
    if base is not None:
        shutil.copytree(base, path)
    path.mkdir(exist_ok=True)
    facts = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 4, "target_modules": ["q_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(facts))
    (path / "adapter_model.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      ")
    return path


@pytest.mark.parametrize("alone", [False, True], ids=["beside-its-base", "alone"])
async def test_an_adapter_is_refused_by_name_and_its_base_not_served_in_its_place(
    model: Path, tmp_path: Path, alone: bool
) -> None:
    """10: KV of another adapter was accepted. Adapters (LoRA) cannot be had yet: a folder that holds one is refused in
    one sentence that says what to do, and never loaded without it."""
    folder = adapter_folder(tmp_path / "tuned", None if alone else model)
    with pytest.raises(Unsupported, match=r"adapter \(LoRA\) in .*tuned is not supported: merge it") as caught:
        async with opened(tmp_path / "home", folder):
            pass
    assert caught.value.param == "model"
    options = ["--fast", "--home", str(tmp_path / "other"), "--model", str(folder), "--json"]
    shown = await asyncio.to_thread(CliRunner().invoke, app, ["doctor", *options])
    assert shown.exit_code == 1
    assert any("adapter (LoRA)" in problem["what"] for problem in json.loads(shown.output)["problems"])


# -- claimed but not used ----------------------------------------------------------------------------------------------


async def test_before_the_first_request_nothing_is_claimed(models: Path, tmp_path: Path) -> None:
    """16: the gauge of hits stood at 100 % when there had been no request."""
    async with opened(tmp_path / "home", model_folder(models)) as kv:
        assert kv.stats().hit_rate is None
        metrics = kv.metrics().decode()
        assert "agentkv_known_tokens_total 0.0" in metrics
        assert "agentkv_cached_tokens_total 0.0" in metrics
        assert "hit_ra" not in metrics, "counters only"
        looked = await asyncio.to_thread(CliRunner().invoke, app, ["top", "--home", str(kv.settings.home), "--once"])
        assert "reused - of known tokens" in " ".join(looked.output.split())
        session = await kv.sessions.create()
        await said(session, turns(1), TOKENS)
        assert kv.stats().hit_rate is None, "a first turn has nothing to hit"
        await said(session, turns(1), TOKENS)
        assert kv.stats().hit_rate == 1.0
        shutil.rmtree(kv.settings.home / "blobs")
        await session.suspend("host")
        session._core.held.clear()
        kv.sessions.tiers.host.clear()
        await said(session, turns(1), TOKENS)
        stats = kv.stats()
        assert stats.hit_rate is not None
        assert stats.hit_rate == stats.cached_tokens / stats.known_tokens < 0.5


# -- windows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["static", "dynamic"])
async def test_a_prompt_longer_than_the_window_is_never_held_whole(model: Path, tmp_path: Path, layout: str) -> None:
    """20: a prompt longer than the window was stored whole, then shifted by one.

    23: resuming a conversation that is longer than the context was rejected."""
    long = [prompt(700, 1), prompt(600, 2), prompt(30, 3)]
    home = tmp_path / "home"
    async with opened(tmp_path / "twin", model, layout=layout) as kv:
        twin = [r.ids for r in await said(await kv.sessions.create(policy="sink:96"), long, TOKENS)]
    async with opened(home, model, layout=layout) as kv:
        session, peak = await kv.sessions.create(policy="sink:96"), 0
        done = asyncio.create_task(said(session, long[:2], TOKENS))
        while not done.done():
            state = session._core.kv
            peak = max(peak, 0 if state is None else state.tokens)
            await asyncio.sleep(0.001)
        replies = await done
        assert 64 < peak <= 96, "pieces, each after an eviction"
        most = kv.sessions.tiers.layout.bytes_needed(None, 96, 96)
        assert (await session.state()).device_bytes <= 2 * most
    async with opened(home, model, layout=layout) as kv:
        session = await kv.sessions.get(session.id)
        assert len(await session.token_ids()) > CONTEXT
        report = await session.resume()
        assert (report.source, report.reason) == ("disk", None)
        replies += await said(session, long[2:], TOKENS)
        assert [reply.ids for reply in replies] == twin
        await check_session(kv, session)


# -- missed hits -------------------------------------------------------------------------------------------------------

CHANGEABLE = (
    "{% set clock = strftime_now('%H:%M:%S.%f') %}{{ clock }} {{ mood }}\n"
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}\n"
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ clock }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if mood %}({{ mood }}) {% endif %}{% endif %}"
)


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


async def test_clock_tool_order_and_template_arguments_are_the_sessions_own(models: Path, tmp_path: Path) -> None:
    """25: a clock in the system prompt, or another order of tools, changed the head and every token was computed again.
    26: a template argument changed the head: 5 s became 54 s."""
    model, home = tmp_path / "model", tmp_path / "home"
    shutil.copytree(chat_folder(models), model)
    (model / "chat_template.jinja").write_text(CHANGEABLE)
    tools = [tool("look"), tool("ask")]
    async with opened(home, model) as kv:
        session = await kv.sessions.create(tools=tools, template_args={"mood": "calm"})
        other = await kv.sessions.create(tools=tools[::-1], template_args={"mood": "calm"})
        await session.send("How is the weather?", max_tokens=TOKENS)
        ledger = await session.token_ids()
        heads = [(await s.items())[0].span for s in (session, other)]
        assert ledger[: heads[0].stop] != (await other.token_ids())[: heads[1].stop], "the control: heads do differ"
    async with opened(home, model) as kv:
        session = await kv.sessions.get(session.id)
        reply = await session.send("And in Paris?", max_tokens=TOKENS)
        assert reply.usage.cached_tokens == len(ledger) - 1
        now = await session.token_ids()
        assert now[: len(ledger)] == ledger
        text = kv.model.tokenizer.decode(now[len(ledger) :])
        clock = kv.model.tokenizer.decode(ledger).split()[0]
        assert clock.count(":") == 2
        assert f"user {clock}" in text, "its clock stands still"
        assert "(calm) " in text, "its arguments came back with it"
        assert "look ask" not in text, "and what was said is not rendered again"


# -- busy --------------------------------------------------------------------------------------------------------------


@contextmanager
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that takes its time: each write begins once the event is set."""
    go_on, put_many = threading.Event(), LocalBlobs.put_many

    def slow(self: LocalBlobs, items: Any) -> None:
        assert go_on.wait(60)
        put_many(self, items)

    with monkeypatch.context() as patch:
        patch.setattr(LocalBlobs, "put_many", slow)
        try:
            yield go_on
        finally:
            go_on.set()


async def test_a_turn_that_comes_in_while_its_session_is_moved_away_waits_and_is_right(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """29: a request came in during eviction."""
    inputs = turns(2)
    twin = await undisturbed(tmp_path / "twin", model, inputs)
    async with opened(tmp_path / "home", model) as kv:
        session = await kv.sessions.create()
        with held_up(monkeypatch) as go_on:
            await said(session, inputs[:1], TOKENS)
            moving = asyncio.create_task(session.suspend("disk"))
            await soon(lambda: session._core.state is SessionState.DEMOTING)
            turn = asyncio.create_task(session.generate_tokens(inputs[1], max_tokens=TOKENS))
            done, _ = await asyncio.wait([moving, turn], timeout=0.2)
            assert not done, "the disk is still busy"
            go_on.set()
            report, reply = await moving, await turn
        assert (report.tier, reply.ids) == ("disk", twin[1])
        assert (reply.restore.source, reply.restore.reason) == ("disk", None)
        await check_session(kv, session)
        await check_home(kv)


async def test_a_listener_that_goes_away_gives_its_memory_back(model: Path, tmp_path: Path) -> None:
    """30: a client that disconnected kept its memory held, whether it had asked for a stream or for the whole reply."""
    async with opened(tmp_path / "home", model) as kv:

        async def streaming(session: Session) -> None:
            async for _ in session.stream_continue(max_tokens=600, ignore_eos=True):
                pass

        async def plain(session: Session) -> None:
            await session.continue_(max_tokens=600, ignore_eos=True)

        listen: Callable[[Session], Awaitable[None]]
        for listen in (plain, streaming):
            session = await kv.sessions.create()
            await said(session, turns(1), TOKENS)
            before, before_steps = (await session.state()).device_bytes, kv.model.engine.steps
            listener = asyncio.create_task(listen(session))
            await soon(lambda least=before_steps + 3: kv.model.engine.steps > least)  # type: ignore[misc]
            assert session._core.reserved > before
            listener.cancel()
            with suppress(asyncio.CancelledError):
                await listener
            assert not (await session.state()).busy
            steps = kv.model.engine.steps
            assert steps < before_steps + 500, "nobody computes for nobody"
            await asyncio.sleep(0.05)
            assert kv.model.engine.steps == steps
            await session.suspend()
            assert kv.stats().tiers["device"].used == 0
            await session.delete()


# -- bytes and time ----------------------------------------------------------------------------------------------------


async def test_what_rests_in_host_memory_keeps_no_tensor_of_the_device_alive(model: Path, tmp_path: Path) -> None:
    """35: a slice that was kept held on to the whole tensor that it was cut from."""
    users = torch._C._storage_Use_Count  # type: ignore[attr-defined]
    async with opened(tmp_path / "home", model) as kv:
        session = await kv.sessions.create()
        await said(session, turns(2), TOKENS)
        await written(kv)
        state = session._core.kv
        assert state is not None
        storages = [
            keys.untyped_storage()
            for group in range(len(state.geometry.groups))
            for run in state.visible(group)
            for keys in state.read(group, run).keys
        ]
        del state
        assert len(storages) == 3
        assert min(users(storage._cdata) for storage in storages) > 1
        await session.suspend("host")
        gc.collect()
        assert [users(storage._cdata) for storage in storages] == [1] * 3, "the test's own"
        held = (await session.state()).host_bytes
        payloads = [kv.sessions.tiers.host.get(name) for name in session._core.held]
        assert sum(len(payload or b"") for payload in payloads) == held > 0
        assert all(type(payload) is bytes for payload in payloads), "no views of anything"


async def test_many_short_turns_come_back_as_few_large_chunks(models: Path, tmp_path: Path) -> None:
    """37: a full hit took 2.0 s instead of 0.4 s, since thousands of small blocks were put together again."""
    async with opened(tmp_path / "home", model_folder(models), idle_codec="int8") as kv:
        session = await kv.sessions.create()
        for i in range(60):
            await said(session, [prompt(8, i)], 4)
        await written(kv)
        segments = (await kv.sessions.repository.manifest(session.id)).segments
        sealed = [segment for segment in segments if segment.codec == "int8"]
        assert [len(segment.span) for segment in sealed] == [256, 256]
        assert len(segments) - len(sealed) <= (128 + 256) // 12, "what is recent, a chunk a turn"
        assert len(chunk_files(tmp_path / "home")) == len(segments)


async def test_a_place_for_files_that_cannot_be_had_is_told_at_once(model: Path, tmp_path: Path) -> None:
    """38: the disk tier was silently off, since its path did not exist at the start."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "blobs").write_text("a file where the folder belongs")
    with pytest.raises(StorageError, match="blobs cannot be opened"):
        async with opened(home, model):
            pass
    (home / "blobs").unlink()
    async with opened(home / "not" / "there" / "yet", model) as kv:
        assert set(kv.stats().tiers) == {"device", "host", "disk"}
        session = await kv.sessions.create()
        await said(session, turns(1), TOKENS)
        assert (await session.suspend()).tier == "disk"


async def test_a_disk_that_stops_taking_kv_is_told_counted_and_shown(model: Path, tmp_path: Path) -> None:
    """33: no limit at all, until the disk was full and the server dead. 38: a tier that is off must show."""
    seen: list[tuple[str, str]] = []

    async def watch(kv: AgentKV) -> None:
        seen.extend([(event.kind, str(event.details.get("reason", ""))) async for event in kv.events()])

    async with opened(tmp_path / "home", model) as kv:
        watcher = asyncio.create_task(watch(kv))
        await asyncio.sleep(0)
        session = await kv.sessions.create()
        blobs = kv.sessions.tiers.blobs
        assert isinstance(blobs, LocalBlobs)
        budget, blobs.budget_bytes = blobs.budget_bytes, 100
        await said(session, turns(1), TOKENS)
        await written(kv)
        stats = kv.stats()
        assert stats.storage_error is not None
        assert (stats.tiers["disk"].used, stats.tiers["disk"].budget) == (0, 100)
        assert "agentkv_storage_degraded 1.0" in kv.metrics().decode()
        looked = await asyncio.to_thread(CliRunner().invoke, app, ["top", "--home", str(kv.settings.home), "--once"])
        assert "the disk refuses KV" in looked.output
        blobs.budget_bytes = budget
        await said(session, turns(1), TOKENS)
        await written(kv)
        assert kv.stats().storage_error is None
        assert "agentkv_storage_degraded 0.0" in kv.metrics().decode()
    await watcher
    told = [(kind, reason) for kind, reason in seen if kind.startswith("storage")]
    assert [kind for kind, _ in told] == ["storage_full", "storage_ok"]
    assert told[0][1] == stats.storage_error
