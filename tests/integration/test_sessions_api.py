"""The Python API as users write it: names, replies, sampling, and what it refuses in which words."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from homes import CONTEXT, chat_folder, check_session, model_folder, opened, prompt

import agentkv
from agentkv import AgentKV, Done, Item, Reply, Session, SessionInfo, TextDelta
from agentkv.errors import Closed, ContextTooLong, InvalidRequest, SessionNotFound, TemplateError, Unsupported

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
QUESTION = "How is the weather in Paris?"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
async def kv(models: Path, tmp_path: Path) -> Any:
    async with opened(tmp_path / "home", chat_folder(models)) as runtime:
        yield runtime


async def both(kv: AgentKV, *says: Any, **create: Any) -> list[Session]:
    """Two sessions with the same past."""
    pair = [await kv.sessions.create(system="You are helpful.", **create) for _ in range(2)]
    for session in pair:
        for text in says:
            await session.send(text, max_tokens=5)
    return pair


# -- the example in the README ----------------------------------------------------------------------------------------


async def test_the_example_works_as_it_is_written(models: Path, tmp_path: Path) -> None:
    model = str(chat_folder(models))
    async with AgentKV.open(model=model, home=tmp_path / "state", disk_margin=0, idle_codec="exact") as kv:
        session = await kv.sessions.create(system="You are Bolt, a terse assistant.", agent_id="bolt")
        reply = await session.send("What is the capital of France?", max_tokens=64)
        assert isinstance(reply, Reply)
        assert reply.finish_reason in ("stop", "length")
        assert reply.usage.cached_tokens == 0 < reply.usage.prompt_tokens
        assert 0 < reply.ttft_seconds <= reply.seconds
        assert reply.usage.completion_tokens == len(reply.ids) <= 64
        assert (reply.session_id, reply.seed, reply.logprobs) == (session.id, None, None)
        events = []
        async for event in session.stream("And of Italy?"):
            events.append(event)
            print(event.text, end="")
        assert all(isinstance(event, TextDelta) and event.text for event in events[:-1])
        assert isinstance(events[-1], Done)
        assert "".join(event.text for event in events) == events[-1].reply.text
        assert events[-1].reply.restore.source == "device"
        report = await session.suspend(tier="disk")
        assert (report.session_id, report.tier) == (session.id, "disk")
        assert report.nbytes > 0 < report.tokens
        assert report.seconds > 0
        session_id = session.id
    async with AgentKV.open(model=model, home=tmp_path / "state", disk_margin=0, idle_codec="exact") as kv:
        session = await kv.sessions.get(session_id)
        reply = await session.send("Which one did I ask first?")
        assert reply.usage.cached_tokens > 0
        assert reply.restore.source == "disk"
        assert (reply.restore.codec, reply.restore.reason) == ("exact", None)
        assert reply.restore.tokens == reply.usage.cached_tokens == report.tokens
        assert reply.restore.seconds > 0


async def test_open_may_be_awaited_and_closed_by_hand(models: Path, tmp_path: Path) -> None:
    kv = await AgentKV.open(model=str(chat_folder(models)), home=tmp_path, disk_margin=0, idle_codec="exact")
    with pytest.raises(Closed):
        await kv
    await kv.close()
    await kv.close()
    with pytest.raises(Closed):
        _ = kv.model
    with pytest.raises(Closed):
        await kv.sessions.create()


# -- reading ----------------------------------------------------------------------------------------------------------


async def test_items_ledger_and_state_agree(kv: AgentKV) -> None:
    session = await kv.sessions.create(system="You are helpful.", agent_id="a", metadata={"user": 7})
    first = await session.send(QUESTION, max_tokens=5)
    appended = await session.append([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    items = await session.items()
    assert [(item.role, item.kind, item.generated) for item in items] == [
        ("system", "message", False),
        ("user", "message", False),
        ("assistant", "message", True),
        ("user", "message", False),
        ("assistant", "message", False),
    ]
    assert all(isinstance(item, Item) and item.id.startswith("item_") for item in items)
    assert items[2].id == first.item_id
    assert [item.text for item in items] == ["You are helpful.", QUESTION, first.text, "a", "b"]
    assert items[3:] == appended
    ledger = await session.token_ids()
    assert ledger[items[2].span.stop - len(first.ids) : items[2].span.stop] == list(first.ids)
    state = await session.state()
    assert isinstance(state, SessionInfo)
    assert (state.id, state.agent_id, state.metadata) == (session.id, "a", {"user": 7})
    assert (session.agent_id, session.metadata) == ("a", {"user": 7})
    assert (state.state, state.tier, state.busy, state.turns) == ("live", "device", False, 3)
    assert (state.ledger_tokens, state.pinned, state.policy) == (len(ledger), items[0].span, "full")
    assert state.kv_tokens == len(ledger) - 1
    assert state.device_bytes > 0
    await check_session(kv, session)
    await session.suspend()
    state = await session.state()
    assert (state.state, state.tier, state.device_bytes, state.stored_tokens) == ("disk", "disk", 0, len(ledger) - 1)
    assert state.disk_bytes > 0


async def test_list_is_newest_first_in_pages_and_by_agent(kv: AgentKV) -> None:
    made = [await kv.sessions.create(agent_id=f"agent{i % 2}") for i in range(5)]
    newest_first = [session.id for session in reversed(made)]
    assert [record.id for record in await kv.sessions.list()] == newest_first
    page = await kv.sessions.list(limit=2)
    assert [record.id for record in page] == newest_first[:2]
    assert [record.id for record in await kv.sessions.list(before=page[-1].id, limit=2)] == newest_first[2:4]
    assert {record.agent_id for record in await kv.sessions.list(agent_id="agent1")} == {"agent1"}
    for missing in ("sess_none", ""):
        with pytest.raises(SessionNotFound):
            await kv.sessions.get(missing)
        with pytest.raises(SessionNotFound):
            await kv.sessions.delete(missing)


async def test_what_was_created_is_frozen_with_the_session(kv: AgentKV) -> None:
    session = await kv.sessions.create(system="You are helpful.", idle_codec="raw")
    await session.send(QUESTION, max_tokens=5)
    await session.suspend()
    reply = await session.send(QUESTION, max_tokens=5)
    assert reply.restore.codec == "raw"
    assert (await session.state()).idle_codec == "raw"


# -- sampling ---------------------------------------------------------------------------------------------------------


async def test_a_seed_makes_sampling_reproducible_and_another_seed_does_not(kv: AgentKV) -> None:
    hot = {"temperature": 1.5, "top_p": 0.95, "top_k": 100, "min_p": 0.001, "repetition_penalty": 1.05}
    one, two = await both(kv, "Hello")
    first, second = await asyncio.gather(*(s.send(QUESTION, max_tokens=24, seed=3, **hot) for s in (one, two)))
    assert first.ids == second.ids
    assert first.seed == second.seed == 3
    three, four = await both(kv, "Hello")
    other = await three.send(QUESTION, max_tokens=24, seed=4, **hot)
    assert other.ids != first.ids
    drawn = await four.send(QUESTION, max_tokens=24, **hot)
    assert drawn.seed is not None
    five, _ = await both(kv, "Hello")
    again = await five.send(QUESTION, max_tokens=24, seed=drawn.seed, **hot)
    assert again.ids == drawn.ids, "the seed that a reply names reproduces it"


async def test_a_stop_string_ends_the_reply_and_is_no_part_of_it(kv: AgentKV) -> None:
    one, two = await both(kv)
    whole = await one.send(QUESTION, max_tokens=40, ignore_eos=True)
    text = whole.text
    stop = next(text[i : i + 2] for i in range(4, len(text) - 2) if text.find(text[i : i + 2]) == i)
    events = [event async for event in two.stream(QUESTION, max_tokens=40, ignore_eos=True, stop=[stop, "never said"])]
    reply = events[-1].reply  # type: ignore[union-attr]
    assert reply.text == text[: text.index(stop)] == "".join(event.text for event in events)
    assert reply.finish_reason == "stop"
    assert len(reply.ids) < len(whole.ids)
    assert whole.ids[: len(reply.ids)] == reply.ids
    await check_session(kv, two)
    after = await two.send("Go on", max_tokens=5)
    assert after.usage.cached_tokens > 0


async def test_logprobs_are_those_of_the_chosen_tokens(kv: AgentKV) -> None:
    one, two = await both(kv)
    reply = await one.send(QUESTION, max_tokens=6, logprobs=3, ignore_eos=True)
    assert reply.logprobs is not None
    assert [entry.token for entry in reply.logprobs] == list(reply.ids)
    for entry in reply.logprobs:
        assert len(entry.top) == 3
        assert entry.top[0] == (entry.token, entry.logprob), "greedy takes the likeliest"
        assert 0 >= entry.top[0][1] >= entry.top[1][1] >= entry.top[2][1]
    plain = await two.send(QUESTION, max_tokens=6, logprobs=0, ignore_eos=True)
    assert plain.logprobs is not None
    assert [entry.top for entry in plain.logprobs] == [()] * 6


async def test_the_default_limit_is_the_settings_and_the_context_cuts_it(models: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "home", model_folder(models), max_tokens=7) as kv:
        session = await kv.sessions.create()
        assert len((await session.generate_tokens([1, 2])).ids) == 7
        await session.append_tokens(prompt(CONTEXT - 9 - 4))
        reply = await session.generate_tokens([1])
        assert (len(reply.ids), reply.finish_reason) == (3, "length")
        assert len(await session.token_ids()) == CONTEXT


# -- going on ---------------------------------------------------------------------------------------------------------


async def test_continue_after_a_length_stop_is_one_longer_generation(kv: AgentKV) -> None:
    one, two = await both(kv)
    whole = await one.send(QUESTION, max_tokens=20, ignore_eos=True)
    first = await two.send(QUESTION, max_tokens=9, ignore_eos=True)
    assert first.finish_reason == "length"
    await two.suspend()
    second = await two.continue_(max_tokens=4, ignore_eos=True)
    deltas = [event async for event in two.stream_continue(max_tokens=7, ignore_eos=True)]
    third = deltas[-1].reply  # type: ignore[union-attr]
    assert (*first.ids, *second.ids, *third.ids) == whole.ids
    assert await one.token_ids() == await two.token_ids()
    assert second.usage.prompt_tokens == second.usage.cached_tokens + 1
    await check_session(kv, two)


async def test_append_then_continue_answers_what_was_appended(kv: AgentKV) -> None:
    one, two = await both(kv, "Hello")
    sent = await one.send(QUESTION, max_tokens=8)
    items = await two.append(QUESTION)
    assert [(item.role, item.text, item.generated) for item in items] == [("user", QUESTION, False)]
    continued = await two.continue_(max_tokens=8)
    assert continued.ids == sent.ids
    assert await one.token_ids() == await two.token_ids()


async def test_one_message_a_list_and_a_string_are_the_same(kv: AgentKV) -> None:
    sessions = [await kv.sessions.create() for _ in range(3)]
    message = {"role": "user", "content": QUESTION}
    forms = (QUESTION, message, [message])
    replies = [await s.send(form, max_tokens=6) for s, form in zip(sessions, forms, strict=True)]
    assert len({reply.ids for reply in replies}) == 1


async def test_tools_reach_a_template_that_does_not_know_them(kv: AgentKV) -> None:
    session = await kv.sessions.create(system="You are helpful.", tools=[TOOL])
    decode = kv.model.tokenizer.decode
    head = decode(await session.token_ids())
    assert "get_weather" in head
    assert "Weather of a city" in head
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    await session.append(
        [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
    )
    reply = await session.send({"role": "tool", "tool_call_id": "c1", "content": "sunny, 21 degrees"}, max_tokens=5)
    text = decode(await session.token_ids())
    assert text.index(QUESTION) < text.index('"city": "Paris"') < text.index("sunny, 21 degrees")
    assert [item.kind for item in await session.items()] == [
        "message", "message", "tool_call", "tool_result", "message",
    ]  # fmt: skip
    assert reply.usage.cached_tokens > 0


# -- tokens -----------------------------------------------------------------------------------------------------------


async def test_token_level_turns(models: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "home", model_folder(models)) as kv:
        one, two = await kv.sessions.create(), await kv.sessions.create()
        ids = prompt(30)
        reply = await one.generate_tokens(ids, max_tokens=9)
        assert (reply.text, len(reply.ids), reply.finish_reason) == ("", 9, "length")
        (item,) = await two.append_tokens(ids[:20])
        assert (item.kind, item.span, item.generated) == ("tokens", (0, 20), False)
        await two.append_tokens(ids[20:])
        parts = [await two.generate_tokens(max_tokens=4), await two.generate_tokens(max_tokens=5)]
        assert (*parts[0].ids, *parts[1].ids) == reply.ids
        assert await one.token_ids() == await two.token_ids() == [*ids, *reply.ids]
        for call in (one.send("Hello"), one.append("Hello")):
            with pytest.raises(InvalidRequest, match=r"append_tokens|no tokenizer"):
                await call
        with pytest.raises(InvalidRequest, match="append_tokens"):
            await kv.sessions.create(system="You are helpful.")
        with pytest.raises(InvalidRequest, match="stop strings") as caught:
            await one.generate_tokens([1], stop="x")
        assert caught.value.param == "stop"
        await check_session(kv, one)


@pytest.mark.parametrize("ids", [[131], [-1], [5, 2**40]])
async def test_ids_outside_the_vocabulary_are_refused(models: Path, tmp_path: Path, ids: list[int]) -> None:
    async with opened(tmp_path / "home", model_folder(models)) as kv:
        session = await kv.sessions.create()
        for call in (session.append_tokens(ids), session.generate_tokens(ids)):
            with pytest.raises(InvalidRequest, match=f"{ids[-1]}.*131") as caught:
                await call
            assert caught.value.param == "ids"
        for wrong in (["a"], [None], [1.5, "2"]):
            with pytest.raises(InvalidRequest, match="integers"):
                await session.append_tokens(wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="at least one"):
            await session.append_tokens([])
        with pytest.raises(InvalidRequest, match="empty"):
            await session.generate_tokens()
        assert (await session.state()).turns == 0
        assert len((await session.generate_tokens([1], max_tokens=2)).ids) == 2


# -- what is refused --------------------------------------------------------------------------------------------------


def test_unknown_settings_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"unknown setting 'modle'.*model") as caught:
        AgentKV.open(modle="x", home=tmp_path)
    assert caught.value.param == "modle"
    for wrong in ({"idle_seconds": -1}, {"dtype": "float7"}, {"device_budget": "many"}):
        with pytest.raises(InvalidRequest, match=next(iter(wrong))):
            AgentKV.open(home=tmp_path, **wrong)


async def test_unknown_arguments_of_create_are_refused_by_name(kv: AgentKV) -> None:
    with pytest.raises(
        InvalidRequest, match=r"unknown retention policy 'rolling'; known: adaptive, full, sink, sliding, turns"
    ):
        await kv.sessions.create(policy="rolling")
    with pytest.raises(InvalidRequest, match=r"zip.*exact"):
        await kv.sessions.create(idle_codec="zip")
    with pytest.raises(InvalidRequest, match="system must be a string"):
        await kv.sessions.create(system=["You"])  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        await kv.sessions.create(template_args={"enable_thinking": True})
    with pytest.raises(InvalidRequest):
        await kv.sessions.create(tools=[{"name": "x"}])
    assert await kv.sessions.list() == []


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"temprature": 1}, InvalidRequest, "did you mean 'temperature'"),
        ({"temperature": 9.0}, InvalidRequest, "temperature"),
        ({"top_p": 0.0}, InvalidRequest, "top_p"),
        ({"max_tokens": 0}, InvalidRequest, "max_tokens"),
        ({"stop": [""]}, InvalidRequest, "stop"),
        ({"logprobs": 50}, InvalidRequest, "logprobs"),
        ({"presence_penalty": 0.5}, Unsupported, "presence_penalty"),
    ],
)
async def test_wrong_sampling_parameters_are_refused_by_name(
    kv: AgentKV, wrong: dict[str, Any], error: type[InvalidRequest], words: str
) -> None:
    session = await kv.sessions.create()
    for call in (session.send("Hello", **wrong), session.continue_(**wrong), session.generate_tokens([1], **wrong)):
        with pytest.raises(error, match=words) as caught:
            await call
        assert caught.value.param == next(iter(wrong))
    assert await session.items() == []


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "empty"),
        (7, "int"),
        ([{"role": "wizard", "content": "x"}], "role"),
        ([{"role": "user"}], "content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "image"),
        ([{"role": "tool", "content": "x"}], "tool_call_id"),
        (["x"], "object"),
    ],
)
async def test_malformed_messages_are_refused_and_leave_no_trace(kv: AgentKV, messages: Any, words: str) -> None:
    session = await kv.sessions.create(system="You are helpful.")
    before = await session.items()
    for call in (session.send(messages, max_tokens=1), session.append(messages)):
        with pytest.raises(InvalidRequest, match=words):
            await call
    assert await session.items() == before
    assert not (await session.state()).busy


async def test_a_context_that_is_too_long_is_refused_with_the_numbers(kv: AgentKV) -> None:
    session = await kv.sessions.create(system="You are helpful.")
    await session.send("Hello", max_tokens=2)
    before = await session.token_ids()
    with pytest.raises(ContextTooLong) as caught:
        await session.send("weather " * 2000)
    assert caught.value.limit == CONTEXT < caught.value.tokens
    assert f"{caught.value.tokens:,}" in str(caught.value)
    assert f"{CONTEXT:,}" in str(caught.value)
    with pytest.raises(ContextTooLong):
        await session.append("weather " * 2000)
    with pytest.raises(ContextTooLong, match="shorten"):
        await kv.sessions.create(system="weather " * 2000)
    assert await session.token_ids() == before
    assert (await session.send("Hello", max_tokens=2)).usage.cached_tokens > 0


async def test_a_session_is_suspended_to_host_or_disk_only(kv: AgentKV) -> None:
    session = await kv.sessions.create()
    for tier in ("device", "tape"):
        with pytest.raises(InvalidRequest, match="host or disk"):
            await session.suspend(tier=tier)
    report = await session.suspend()
    assert (report.tokens, report.chunks_written, report.nbytes) == (0, 0, 0), "nothing to move yet"
    assert (await session.resume()).source == "new"


async def test_a_template_that_refuses_is_a_named_error(models: Path, tmp_path: Path) -> None:
    folder = chat_folder(models, seed=3)
    template = folder / "chat_template.jinja"
    refusal = "{% if messages[-1]['content'] == 'no' %}{{ raise_exception('I will not') }}{% endif %}"
    template.write_text(refusal + template.read_text())
    async with opened(tmp_path / "home", folder) as kv:
        session = await kv.sessions.create()
        with pytest.raises(TemplateError, match="I will not"):
            await session.send("no", max_tokens=1)
        await session.send("yes", max_tokens=1)


# -- the package ------------------------------------------------------------------------------------------------------


def python(program: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_agentkv_imports_nothing_heavy() -> None:
    loaded = python(
        "import sys, agentkv; from agentkv import AgentKV, AgentKVError, Reply, Settings, TextDelta\n"
        "heavy = ['torch', 'transformers', 'sqlalchemy', 'aiohttp', 'numpy', 'tokenizers', 'llguidance']\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    assert loaded == "[]"


def modules() -> Iterator[str]:
    root = Path(agentkv.__file__).parent
    for path in sorted(root.rglob("*.py")):
        parts = ["agentkv", *path.relative_to(root).with_suffix("").parts]
        if "migrations" not in parts and parts[-1] != "__main__":
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


ALONE = """
import importlib, sys
for name in sys.argv[1:]:
    # Other packages stay, or each import would load torch again; of this one nothing does.
    for loaded in [loaded for loaded in sys.modules if loaded.split(".")[0] == "agentkv"]:
        del sys.modules[loaded]
    try:
        importlib.import_module(name)
    except BaseException as error:
        print(name, repr(error))
"""


@pytest.mark.full
def test_every_module_imports_alone() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE, *modules()], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr


def test_all_is_sorted_complete_and_true() -> None:
    assert agentkv.__all__ == sorted(agentkv.__all__)
    assert set(agentkv.__all__) == set(dir(agentkv)) - {"__version__"}
    for name in agentkv.__all__:
        assert getattr(agentkv, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = agentkv.nothing_here
