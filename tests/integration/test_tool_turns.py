"""Tool calls end to end: a real turn's tokens become calls, streamed and whole, and their results go back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_templates import NAMED_MISTRAL, QWEN_CODER, TOOL, with_special
from homes import check_session, model_folder, opened
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from agentkv import AgentKV, Done, Session, TextDelta, ToolCall, ToolCallEvent
from agentkv.engine.sampling import Sampler
from agentkv.errors import InvalidRequest, Unsupported
from agentkv.sessions import answering

WORDS: Any = {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [TOOL, {"type": "function", "function": WORDS}]
PARIS = {"city": "Paris"}
# (family of the tokenizer, more special tokens, chat template, two calls)
MODELS: dict[str, tuple[str, Sequence[str], str | None, str]] = {
    "hermes": (
        "qwen3",
        ("<tool_call>", "</tool_call>"),
        None,
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    "qwen-coder": (
        "qwen3",
        (),
        QWEN_CODER,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    "llama3": (
        "llama3",
        ("<|python_tag|>",),
        None,
        '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}',
    ),
    "mistral": (
        "mistral",
        (),
        None,
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "9aBcD0123"}, '
        '{"name": "now", "arguments": {}, "id": "abcdefghi"}]',
    ),
    "mistral named": (
        "mistral",
        ("[ARGS]",),
        NAMED_MISTRAL,
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}',
    ),
    "blocks": (
        "chatml",
        (),
        None,
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models are."""
    return tmp_path_factory.mktemp("models")


def folder(root: Path, name: str, template: str | None = None) -> Path:
    """A tiny model with that tokenizer, and perhaps another chat template."""
    family, extra, source, _ = MODELS[name]
    tokenizer = with_special(family, extra, template or source)
    path = model_folder(root, vocab=len(tokenizer) + 3, label=f"tools-{name}{'-changed' if template else ''}")
    if not (path / "tokenizer.json").exists():
        tokenizer.save_pretrained(path)
    return path


class Scripted(Sampler):
    """Chooses what the script says, whatever the model thinks."""

    script: Iterator[int] = iter(())

    def __init__(self, params: Any, device: Any) -> None:
        super().__init__(params, device)
        self.plain = False

    def sample(self, logits: Tensor, history: Sequence[int]) -> int:
        return next(type(self).script)


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``says(kv, text)``: what the model's next reply will be."""
    monkeypatch.setattr(answering, "Sampler", Scripted)

    def set_script(kv: AgentKV, text: str, *, end: bool = True) -> list[int]:
        tokenizer = kv.model.tokenizer
        assert isinstance(tokenizer, PreTrainedTokenizerFast)
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        Scripted.script = iter([*ids, *([tokenizer.eos_token_id] if end else [])])
        return ids

    return set_script


async def events(session: Session, message: Any, **sampling: Any) -> list[Any]:
    return [event async for event in session.stream(message, max_tokens=300, **sampling)]


@pytest.mark.parametrize("name", MODELS)
async def test_calls_are_told_while_they_stream_and_their_results_go_back(
    name: str, root: Path, tmp_path: Path, says: Any
) -> None:
    calls = MODELS[name][3]
    before = "" if name == "llama3" else "I will look."
    async with opened(tmp_path / "home", folder(root, name), max_tokens=300) as kv:
        session = await kv.sessions.create("Be kind.", tools=TOOLS)
        twin = await kv.sessions.create("Be kind.", tools=TOOLS)
        ids = says(kv, f"{before}\n\n{calls}" if before else calls)
        *streamed, done = await events(session, "Weather in Paris, and the time?")
        assert isinstance(done, Done)
        reply = done.reply
        assert "".join(e.text for e in streamed if isinstance(e, TextDelta)) == reply.text == before
        told = [event for event in streamed if isinstance(event, ToolCallEvent)]
        assert [event.call for event in told] == list(reply.tool_calls) and [event.index for event in told] == [0, 1]
        assert [(call.name, call.arguments) for call in reply.tool_calls] == [("get_weather", PARIS), ("now", {})]
        assert reply.tool_calls[0].arguments_text == '{"city": "Paris"}'
        assert reply.finish_reason == "tool_calls" and "".join(e.text for e in (*streamed, done)) == before
        # The ledger has the tokens as they were generated.
        assert reply.ids[:-1] == tuple(ids) and (await session.token_ids())[-len(reply.ids) :] == list(reply.ids)

        says(kv, f"{before}\n\n{calls}" if before else calls)
        whole = await twin.send("Weather in Paris, and the time?", max_tokens=300)
        assert (whole.text, whole.ids, whole.finish_reason) == (reply.text, reply.ids, "tool_calls")
        assert [c.model_copy(update={"id": ""}) for c in whole.tool_calls] == [
            c.model_copy(update={"id": ""}) for c in reply.tool_calls
        ]

        item = (await session.items())[-1]
        assert item.kind == "tool_call" and item.content["tool_calls"] == [c.canonical() for c in reply.tool_calls]
        says(kv, "It is sunny.")
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": answer}
            for call, answer in zip(reply.tool_calls, ("sunny", "noon"), strict=True)
        ]
        at = len(await session.token_ids())
        answer = await session.send(results, max_tokens=300)
        assert (answer.text, answer.tool_calls, answer.finish_reason) == ("It is sunny.", (), "stop")
        assert [item.kind for item in (await session.items())[-3:]] == ["tool_result", "tool_result", "message"]
        said = kv.model.tokenizer.decode((await session.token_ids())[at:])
        assert said.index("sunny") < said.index("noon") < said.index("It is sunny.")
        await check_session(kv, session)


async def test_the_skeleton_of_a_result_has_the_real_call_also_after_a_restart(
    root: Path, tmp_path: Path, says: Any
) -> None:
    home, model = tmp_path / "home", folder(root, "mistral")
    async with opened(home, model, max_tokens=300) as kv:
        session = await kv.sessions.create(tools=TOOLS)
        says(kv, MODELS["mistral"][3])
        reply = await session.send("Weather?")
        name = session.id
        assert [call.id for call in reply.tool_calls] == ["9aBcD0123", "abcdefghi"]
    async with opened(home, model, max_tokens=300) as kv:
        session = await kv.sessions.get(name)
        says(kv, "sunny")
        at = len(await session.token_ids())
        await session.send({"role": "tool", "tool_call_id": "9aBcD0123", "content": "sun"})
        said = kv.model.tokenizer.decode((await session.token_ids())[at:])
        assert '"call_id": "9aBcD0123"' in said


async def test_results_of_calls_that_nobody_made_are_refused_by_name(root: Path, tmp_path: Path, says: Any) -> None:
    async with opened(tmp_path / "home", folder(root, "hermes"), max_tokens=300) as kv:
        session = await kv.sessions.create(tools=TOOLS)
        stray = {"role": "tool", "tool_call_id": "call_9", "content": "x"}
        with pytest.raises(InvalidRequest, match=r"no call 'call_9' in session sess_\w+; its last calls: none"):
            await session.send(stray)
        says(kv, MODELS["hermes"][3])
        reply = await session.send("Weather?")
        first, second = (call.id for call in reply.tool_calls)
        before = await session.token_ids()
        for run in (session.send, session.append):
            with pytest.raises(InvalidRequest, match=f"its last calls: '{first}', '{second}'") as refused:
                await run([{"role": "tool", "tool_call_id": first, "content": "x"}, stray])  # type: ignore[operator]
            assert refused.value.param == "messages[1].tool_call_id"
        assert await session.token_ids() == before
        # What the client says the assistant called is a call too, in the same list as well; and a fork knows them all.
        said = {"id": "mine", "type": "function", "function": {"name": "now", "arguments": "{}"}}
        await session.append(
            [
                {"role": "tool", "tool_call_id": first, "content": "x"},
                {"role": "assistant", "content": None, "tool_calls": [said]},
                {"role": "tool", "tool_call_id": "mine", "content": "noon"},
            ]
        )
        fork = await session.fork()
        await fork.append({"role": "tool", "tool_call_id": second, "content": "late"})
        back = await session.rewind(turns=2)
        assert back.items
        with pytest.raises(InvalidRequest, match="its last calls: none"):
            await session.append({"role": "tool", "tool_call_id": first, "content": "x"})


@pytest.mark.parametrize(
    "broken",
    [
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par',
        '<tool_call>\n{"name": "launch", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": "Paris"}\n</tool_call> so',
        "<tool_call>",
    ],
)
async def test_what_is_no_call_is_text_as_it_was_generated(broken: str, root: Path, tmp_path: Path, says: Any) -> None:
    async with opened(tmp_path / "home", folder(root, "hermes"), max_tokens=300) as kv:
        session = await kv.sessions.create(tools=TOOLS)
        says(kv, f"Hm. {broken}")
        *streamed, done = await events(session, "Weather?")
        assert all(isinstance(event, TextDelta) for event in streamed)
        assert "".join(event.text for event in streamed) == done.reply.text == f"Hm. {broken}"
        assert (done.reply.tool_calls, done.reply.finish_reason) == ((), "stop")
        assert (await session.items())[-1].kind == "message"
        says(kv, "Sorry.")
        assert (await session.send("Again.")).text == "Sorry."


async def test_a_reply_that_was_cut_says_so_and_keeps_the_calls_that_were_whole(
    root: Path, tmp_path: Path, says: Any
) -> None:
    async with opened(tmp_path / "home", folder(root, "hermes")) as kv:
        session = await kv.sessions.create(tools=TOOLS)
        both = MODELS["hermes"][3]
        ids = says(kv, both, end=False)
        reply = await session.send("Weather?", max_tokens=len(ids) - 3)
        cut = kv.model.tokenizer.decode(ids[:-3])
        assert reply.finish_reason == "length" and [call.name for call in reply.tool_calls] == ["get_weather"]
        assert cut.endswith(reply.text) and reply.text.startswith("<tool_call>")
        says(kv, " more")
        assert (await session.continue_(max_tokens=20)).text == " more"


async def test_without_tools_and_with_none_calls_stay_text(root: Path, tmp_path: Path, says: Any) -> None:
    model, both = folder(root, "blocks"), MODELS["blocks"][3]
    async with opened(tmp_path / "home", model, max_tokens=300) as kv:
        with_tools, without = await kv.sessions.create(tools=TOOLS), await kv.sessions.create()
        says(kv, both)
        reply = await without.send("Hi")
        assert (reply.text, reply.tool_calls, reply.finish_reason) == (both, (), "stop")
        says(kv, both)
        reply = await with_tools.send("Hi", tool_choice="none")
        assert (reply.text, reply.tool_calls, reply.finish_reason) == (both, (), "stop")
        says(kv, both)
        assert len((await with_tools.send("Hi", tool_choice="auto")).tool_calls) == 2
        with pytest.raises(InvalidRequest, match="has no tools"):
            await without.send("Hi", tool_choice="required")
        with pytest.raises(InvalidRequest, match="there is no tool 'launch'; this session has: get_weather, now"):
            await with_tools.send("Hi", tool_choice={"name": "launch"})
        with pytest.raises(InvalidRequest, match="token-level"):
            await without.generate_tokens([1, 2], tool_choice="required")
    async with opened(tmp_path / "home", model, max_tokens=300, tool_format="text") as kv:
        session = await kv.sessions.create(tools=TOOLS)
        says(kv, both)
        assert (await session.send("Hi")).text == both
        says(kv, "ok")
        # Whoever reads the calls out of the text has ids of their own.
        assert (await session.send({"role": "tool", "tool_call_id": "own", "content": "sun"})).text == "ok"


async def test_a_format_nobody_knows_is_refused_when_the_runtime_opens(root: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="unknown tool_format 'xml'; known: hermes, llama3"):
        await opened(tmp_path / "home", folder(root, "blocks"), tool_format="xml")


async def test_tools_that_no_format_reads_are_refused_when_the_session_is_created(root: Path, tmp_path: Path) -> None:
    model = folder(root, "hermes", QWEN_CODER.replace("<function=", "<fn="))
    async with opened(tmp_path / "home", model) as kv:
        with pytest.raises(Unsupported, match="no tool format reads"):
            await kv.sessions.create(tools=TOOLS)
        assert await kv.sessions.list() == []


async def test_an_answer_made_again_and_a_call_edited_are_calls(root: Path, tmp_path: Path, says: Any) -> None:
    async with opened(tmp_path / "home", folder(root, "hermes"), max_tokens=300) as kv:
        session = await kv.sessions.create(tools=TOOLS)
        says(kv, "No.")
        await session.send("Weather?")
        says(kv, MODELS["hermes"][3])
        again = await session.regenerate()
        assert [call.name for call in again.tool_calls] == ["get_weather", "now"]
        with pytest.raises(InvalidRequest, match="there is no tool 'nope'"):
            await session.regenerate(tool_choice={"name": "nope"})
        item = (await session.items())[-1]
        branch = await session.edit(item.id, "Let me see.")
        edited = (await branch.session.items())[-1]
        assert edited.content["content"] == "Let me see." and edited.content["tool_calls"] == item.content["tool_calls"]
        ids = [ToolCall(**call).id for call in item.content["tool_calls"]]
        says(kv, "Sunny.")
        result = [{"role": "tool", "tool_call_id": name, "content": "sun"} for name in ids]
        assert (await branch.session.send(result)).text == "Sunny."
        # What was not made again is as it was: its calls can be answered.
        await session.append(result)


PLACE = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
CHOICES = [{"type": "function", "function": {"name": "go", "parameters": PLACE}}, TOOLS[1]]


@pytest.mark.parametrize("name", MODELS)
async def test_a_required_call_is_a_call_whatever_the_model_would_say(name: str, root: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "home", folder(root, name), max_tokens=300) as kv:
        session = await kv.sessions.create("Be kind.", tools=CHOICES)
        required = await session.send("Where?", tool_choice="required", temperature=1.0, seed=1, max_tokens=160)
        # One that goes on calling is cut: what of it is whole is a call, the rest is text.
        assert {call.name for call in required.tool_calls} <= {"go", "now"} and required.tool_calls
        assert required.text == "" or required.finish_reason == "length"
        *streamed, done = await events(session, "Go.", tool_choice={"name": "go"}, temperature=1.0, seed=1)
        assert done.reply.finish_reason == "tool_calls" and done.reply.text == ""
        (call,) = done.reply.tool_calls
        assert [event.call for event in streamed] == [call]
        assert call.name == "go" and call.arguments in ({"city": "Paris"}, {"city": "Rome"})
        ids = [call.id for call in (*required.tool_calls, call)]
        assert len(set(ids)) == len(ids)
        result = {"role": "tool", "tool_call_id": call.id, "content": "there"}
        free = await session.send(result, tool_choice="none", max_tokens=5)
        assert len(free.ids) <= 5 and free.tool_calls == ()
        await check_session(kv, session)


async def test_a_required_call_is_refused_where_it_cannot_be_promised(root: Path, tmp_path: Path, says: Any) -> None:
    model = folder(root, "hermes")
    async with opened(tmp_path / "home", model) as kv:
        session = await kv.sessions.create(tools=CHOICES)
        says(kv, "a reply that is cut", end=False)
        await session.send("Hi", max_tokens=3)
        before = await session.token_ids()
        with pytest.raises(InvalidRequest, match="the last reply was cut"):
            await session.continue_(tool_choice="required")
        with pytest.raises(InvalidRequest, match="with a schema"):
            await session.send("Hi", tool_choice="required", schema={"type": "object"})
        for name, value in (("ignore_eos", True), ("beams", 2)):
            with pytest.raises(InvalidRequest, match=f"{name}: not with tool_choice 'required'"):
                await session.send("Hi", tool_choice="required", **{name: value})
        assert await session.token_ids() == before
    async with opened(tmp_path / "home", model, tool_format="text") as kv:
        session = await kv.sessions.create(tools=CHOICES)
        with pytest.raises(Unsupported, match="'required' with the tool format 'text'"):
            await session.send("Hi", tool_choice="required")
