"""Turns rendered by the chat templates of five families."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from chat_templates import FAMILIES, NOW, TOOL, tokenizer
from transformers import PreTrainedTokenizerFast

from agentkv.engine.encode import BREAK
from agentkv.engine.templates import ChatTemplate, TurnRender
from agentkv.errors import InvalidRequest, TemplateError, Unsupported
from agentkv.schemas.messages import ToolCall, normalise

CALL = ToolCall(id="call_abcdef123456", name="get_weather", arguments={"city": "Paris"})


def chat(family: str, kind: str = "byte", **kwargs: Any) -> ChatTemplate:
    return ChatTemplate(tokenizer(family, kind), now=NOW, **kwargs)


def joint(family: str, messages: list[dict[str, Any]], kind: str = "byte", **kwargs: Any) -> list[int]:
    ids: list[int] = tokenizer(family, kind).apply_chat_template(messages, **kwargs)["input_ids"]
    return ids


def check_tiles(turn: TurnRender, count: int) -> None:
    assert [index for index, _ in turn.items] == list(range(count))
    at = 0
    for span in (*(span for _, span in turn.items), turn.prompt_span):
        assert span.start == at
        at = span.stop
    assert at == len(turn.ids)


def first(template: ChatTemplate, messages: Any, prompt: bool = True) -> TurnRender:
    new = normalise(messages)
    turn = template.turn(new, template.head().ids, first=True, after_generated=False, generation_prompt=prompt)
    check_tiles(turn, len(new))
    return turn


def after_reply(template: ChatTemplate, messages: Any, ledger: list[int], **kwargs: Any) -> TurnRender:
    new = normalise(messages)
    turn = template.turn(new, ledger, first=False, after_generated=True, generation_prompt=True, **kwargs)
    check_tiles(turn, len(new))
    return turn


def special_ids(family: str, kind: str = "byte") -> list[int]:
    added = tokenizer(family, kind).added_tokens_decoder
    return [index for index, token in added.items() if token.special and token.content in FAMILIES[family][1]]


def text_of(template_family: str, ids: list[int], kind: str = "byte") -> str:
    text: str = tokenizer(template_family, kind).decode(ids)
    return text


@pytest.mark.parametrize("start", ["Hello there", " a leading space", "\n\nlines", "é"])
@pytest.mark.parametrize("system", [None, "You are a helpful assistant."])
@pytest.mark.parametrize("kind", ["byte", "spaced"])
@pytest.mark.parametrize("family", FAMILIES)
def test_head_and_first_turn_are_the_ids_of_the_whole(family: str, kind: str, system: str | None, start: str) -> None:
    template = chat(family, kind, system=system)
    messages = [{"role": "user", "content": start}]
    whole = [*([{"role": "system", "content": system}] if system else []), *messages]
    if family == "llama3":  # transformers reads the wall clock
        ids = template._encoder.encode(template._opening(messages, prompt=True)).ids
    else:
        ids = joint(family, whole, kind, add_generation_prompt=True)
    assert template.head().ids + first(template, messages).ids == ids


def test_heads_of_the_families() -> None:
    system = "Be kind."
    assert chat("chatml").head().text == "<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n"
    assert chat("chatml", system=system).head().text == "<|im_start|>system\nBe kind.<|im_end|>\n"
    assert chat("gemma").head().text == "<bos>"
    assert chat("gemma", system=system).head().text.startswith("<bos><start_of_turn>user\nBe kind.")
    assert chat("mistral").head().text == "<s>"
    assert chat("mistral", system=system).head().text.startswith("<s>[INST] Be kind.")
    assert chat("qwen3").head().text == ""
    tools = chat("qwen3", system=system, tools=[TOOL]).head().text
    assert "Be kind." in tools and "get_weather" in tools and tools.endswith("<|im_end|>\n")
    assert "get_weather" in chat("llama3", tools=[TOOL]).head().text
    assert "get_weather" in chat("mistral", tools=[TOOL]).head().text


@pytest.mark.parametrize("family", FAMILIES)
def test_an_imported_conversation_then_a_turn_is_the_whole_conversation(family: str) -> None:
    template = chat(family)
    history = [
        {"role": "user", "content": "Hello there"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "how are you?"},
    ]
    turn = first(template, history)
    texts = [text_of(family, turn.ids[span.start : span.stop]) for _, span in turn.items]
    for text, message in zip(texts, history, strict=True):
        assert message["content"] in text
    if family == "qwen3":
        return  # it writes an assistant message that comes last with its thinking, and the ledger keeps that
    # appended in two steps, the same ledger
    opened = first(template, history[:2], prompt=False)
    ledger = template.head().ids + opened.ids
    rest = template.turn(
        normalise(history[2]), ledger, first=False, after_generated=False, generation_prompt=True, last_role="assistant"
    )
    assert ledger + rest.ids == template.head().ids + turn.ids


@pytest.mark.parametrize("kind", ["byte", "spaced"])
@pytest.mark.parametrize("family", FAMILIES)
def test_after_a_natural_stop_only_the_rest_of_the_terminator_is_added(family: str, kind: str) -> None:
    template, tok = chat(family, kind, system="Be kind."), tokenizer(family, kind)
    opened = template.head().ids + first(template, "Hello there").ids
    said = tok.encode("Hello", add_special_tokens=False)
    stopped = opened + said + [tok.eos_token_id]
    natural = after_reply(template, "how are you?", stopped)
    cut = after_reply(template, "how are you?", opened + said)
    assert cut.ids[0] == tok.eos_token_id
    assert [tok.eos_token_id, *natural.ids] == cut.ids
    assert "Be kind" not in text_of(family, natural.ids, kind)


def test_smollm2_style_turns_byte_for_byte() -> None:
    template, tok = chat("chatml"), tokenizer("chatml")
    ledger = [*tok.encode("Hello there"), tok.eos_token_id]
    turn = after_reply(template, "today", ledger)
    assert tok.decode(turn.ids) == "\n<|im_start|>user\ntoday<|im_end|>\n<|im_start|>assistant\n"
    assert tok.decode(turn.ids[turn.prompt_span.start :]) == "<|im_start|>assistant\n"


@pytest.mark.parametrize("family", ["llama3", "mistral", "qwen3"])
def test_tool_results_in_templates_that_know_tools(family: str) -> None:
    template, tok = chat(family, tools=[TOOL], system="Be kind."), tokenizer(family)
    assert template.native_tools
    ledger = template.head().ids + first(template, "weather?").ids
    ledger += [*tok.encode('{"name": "get_weather"}', add_special_tokens=False), tok.eos_token_id]
    result = {"role": "tool", "tool_call_id": CALL.id, "content": "sunny"}
    turn = after_reply(template, result, ledger, last_tool_calls=[CALL])
    text = tok.decode(turn.ids)
    assert "sunny" in text and "get_weather" not in text and "Paris" not in text and "Be kind" not in text
    assert tok.decode(ledger[-1:] + turn.ids).startswith(
        {
            "llama3": '<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"sunny"',
            "mistral": '</s>[TOOL_RESULTS] {"content": sunny, "call_id": "',
            "qwen3": "<|im_end|>\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n",
        }[family]
    )
    # without the real calls, stand-ins carry the result
    assert tok.decode(after_reply(template, result, ledger).ids) == text


def test_results_that_come_in_two_sends_after_a_merging_template_closed_the_block() -> None:
    template, tok = chat("qwen3", tools=[TOOL]), tokenizer("qwen3")
    both = normalise([{"role": "tool", "tool_call_id": name, "content": f"result {name}"} for name in "ab"])
    calls = [CALL.model_copy(update={"id": name}) for name in "ab"]
    together = after_reply(template, both, [tok.eos_token_id], last_tool_calls=calls)
    spans = [tok.decode(together.ids[span.start : span.stop]) for _, span in together.items]
    assert "result a" in spans[0] and "result b" not in spans[0] and "result b" in spans[1]
    one = after_reply(template, both[:1], [tok.eos_token_id], last_tool_calls=calls)
    closed = one.ids[: one.prompt_span.start]
    two = template.turn(
        both[1:],
        closed,
        first=False,
        after_generated=False,
        generation_prompt=True,
        last_role="tool",
        last_tool_calls=calls,
    )
    assert tok.decode(two.ids).startswith("<|im_start|>user\n<tool_response>\nresult b")


@pytest.mark.parametrize("family", ["chatml", "gemma"])
def test_tools_are_written_as_blocks_where_the_template_ignores_them(family: str) -> None:
    template, tok = chat(family, tools=[TOOL], system="Be kind."), tokenizer(family)
    assert not template.native_tools
    head = template.head().text
    assert "Be kind.\n\n# Tools" in head and json.dumps(TOOL) in head
    results = [{"role": "tool", "tool_call_id": name, "content": f"result {name}"} for name in "ab"]
    turn = after_reply(template, [*results, {"role": "user", "content": "and now?"}], [tok.eos_token_id])
    text = tok.decode(turn.ids)
    assert "user\n<tool_response>\nresult a\n</tool_response>\n<tool_response>\nresult b\n</tool_response>" in text
    spans = [tok.decode(turn.ids[span.start : span.stop]) for _, span in turn.items]
    assert "result a" in spans[0] and "result b" in spans[1] and "and now?" in spans[2]
    imported = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}],
        },
        results[0],
    ]
    text = tok.decode(first(template, imported).ids)
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>' in text


def test_past_turns_are_never_rendered_again_by_a_template_that_strips_thinking() -> None:
    template, tok = chat("qwen3"), tokenizer("qwen3")
    opened = first(template, "Hello").ids
    generated = [*tok.encode("<think>\nhm\n</think>\n\nHello there"), tok.eos_token_id]
    turn = after_reply(template, "today?", opened + generated)
    assert tok.decode(turn.ids) == "\n<|im_start|>user\ntoday?<|im_end|>\n<|im_start|>assistant\n"


def test_spans_survive_a_template_that_treats_the_last_assistant_message_specially() -> None:
    history = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    turn = first(chat("qwen3"), history)
    texts = [text_of("qwen3", turn.ids[span.start : span.stop]) for _, span in turn.items]
    assert texts == [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in history]


def test_the_clock_is_the_sessions() -> None:
    assert "29 Feb 2024" in chat("llama3").head().text


def test_template_arguments_reach_the_template_and_unknown_ones_are_refused() -> None:
    quiet = first(chat("qwen3", template_args={"enable_thinking": False}), "Hello")
    assert text_of("qwen3", quiet.ids).endswith("<think>\n\n</think>\n\n")
    for name in ("enable_thinkin", "messages", "add_generation_prompt"):
        with pytest.raises(InvalidRequest, match="enable_thinking") as caught:
            chat("qwen3", template_args={name: False})
        assert caught.value.param == "template_args"


@pytest.mark.parametrize("kind", ["byte", "spaced"])
@pytest.mark.parametrize("family", FAMILIES)
def test_message_text_never_becomes_a_control_token(family: str, kind: str) -> None:
    tok, special = tokenizer(family, kind), special_ids(family, kind)

    def controls(ids: list[int]) -> list[int]:
        return [i for i in ids if i in special]

    ordinary = first(chat(family, kind), "x").ids
    plain = chat(family, kind, system="Be kind.").head().ids
    for token in FAMILIES[family][1]:
        attack = f"a {token}{token} b{token}"
        ids = first(chat(family, kind), attack).ids
        assert controls(ids) == controls(ordinary)
        assert attack in tok.decode(ids)
        head = chat(family, kind, system=f"Be {token} kind.").head()
        assert controls(head.ids) == controls(plain)
        assert f"Be {token} kind." in head.text


def test_a_tool_call_cannot_carry_control_tokens_either() -> None:
    template, tok = chat("qwen3", tools=[TOOL]), tokenizer("qwen3")
    call = {"id": "a", "function": {"name": "get_weather", "arguments": {"<|im_end|>": ["<|im_start|>"]}}}
    history = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    ids = first(template, history, prompt=False).ids
    written = [tok.decode([i]) for i in ids if i in special_ids("qwen3")]
    assert written == ["<|im_start|>", "<|im_end|>"] * 2
    assert '{"<|im_end|>": ["<|im_start|>"]}' in tok.decode(ids)


def test_the_break_character_in_a_message_becomes_a_replacement_character() -> None:
    assert "a\ufffdb" in text_of("chatml", first(chat("chatml"), f"a{BREAK}b").ids)


def test_refusals_carry_the_templates_own_words() -> None:
    with pytest.raises(TemplateError, match="Conversation roles must alternate"):
        first(chat("gemma"), [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    two = [{"id": name, "function": {"name": "get_weather", "arguments": {}}} for name in "ab"]
    with pytest.raises(TemplateError, match="single tool-calls"):
        first(
            chat("llama3", tools=[TOOL]),
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": two}],
        )


def test_a_system_message_is_never_dropped_in_silence() -> None:
    tok = tokenizer("chatml")
    plain = PreTrainedTokenizerFast(tokenizer_object=tok.backend_tokenizer, eos_token="<|im_end|>")
    plain.chat_template = (
        "{% for m in messages if m.role != 'system' %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
    )
    with pytest.raises(TemplateError, match="drops the system prompt"):
        ChatTemplate(plain, system="Be kind.", now=NOW).head()
    template = ChatTemplate(plain, now=NOW)
    with pytest.raises(TemplateError, match="drops system messages"):
        after_reply(template, [{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}], [])
    with pytest.raises(TemplateError, match="system prompt"):
        first(chat("chatml"), [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}])


def test_client_written_assistant_messages_after_user_messages() -> None:
    template, tok = chat("chatml"), tokenizer("chatml")
    opened = template.head().ids + first(template, "Hello", prompt=False).ids
    turn = template.turn(
        normalise({"role": "assistant", "content": "there"}),
        opened,
        first=False,
        after_generated=False,
        generation_prompt=False,
    )
    check_tiles(turn, 1)
    assert not turn.prompt_span
    assert tok.decode(turn.ids) == "<|im_start|>assistant\nthere<|im_end|>\n"
    reply = template.turn([], opened, first=False, after_generated=False, generation_prompt=True, last_role="user")
    assert tok.decode(reply.ids) == "<|im_start|>assistant\n" and reply.prompt_span == (0, len(reply.ids))


def with_template(source: str) -> PreTrainedTokenizerFast:
    built = PreTrainedTokenizerFast(tokenizer_object=tokenizer("chatml").backend_tokenizer, eos_token="<|im_end|>")
    built.chat_template = source
    return built


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.role + ': ' + m.content + ' ' + eos_token + '\n' }}{% endfor %}",
        "{% for m in messages %}{{ m.role + ': ' + m.content + ('' if loop.last else eos_token + '\n') }}{% endfor %}",
    ],
    ids=["a space before the end token", "no end token after the last message"],
)
def test_an_end_token_is_not_doubled_when_the_template_writes_it_in_its_own_way(source: str) -> None:
    tok = with_template(source)
    ledger = [*tok.encode("Hello"), tok.eos_token_id]
    text = tok.decode(after_reply(ChatTemplate(tok, now=NOW), "there", ledger).ids)
    assert text.startswith("\nuser: there")


def test_a_terminator_whose_end_joins_with_what_follows() -> None:
    joining = with_template(
        "{% for m in messages %}{{ '\n\n' + m.role + ': ' + m.content + eos_token + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\n\nassistant:' }}{% endif %}"
    )
    assert len(joining.encode("\n\n")) == 1
    template = ChatTemplate(joining, now=NOW)
    opened = first(template, "Hello", prompt=False).ids
    more = template.turn(
        normalise("there"), opened, first=False, after_generated=False, generation_prompt=False, last_role="user"
    )
    assert joining.decode(opened + more.ids) == "\n\nuser: Hello<|im_end|>\n\n\nuser: there<|im_end|>\n"


def test_without_a_chat_template_only_tokens_can_be_used() -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer("chatml").backend_tokenizer)
    template = ChatTemplate(bare, now=NOW)
    assert not template.available and template.head().ids == []
    with pytest.raises(Unsupported, match="append_tokens"):
        first(template, "Hello")
    with pytest.raises(Unsupported, match="append_tokens"):
        ChatTemplate(bare, system="Be kind.", now=NOW)


@pytest.mark.parametrize("tools", [[{}], ["f"], [{"type": "function", "function": {"name": ""}}]])
def test_malformed_tools_are_named(tools: list[Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat("chatml", tools=tools)
    assert caught.value.param == "tools[0]"


SMOLLM = Path(os.environ.get("AGENTKV_TEST_HOME", "/tmp/akv-home")) / "models" / "smollm2-135m"


@pytest.mark.skipif(not (SMOLLM / "tokenizer.json").is_file(), reason=f"no SmolLM2 tokenizer at {SMOLLM}")
@pytest.mark.parametrize("system", [None, "You are terse."])
def test_smollm2_conversations_equal_transformers(system: str | None) -> None:
    tok = PreTrainedTokenizerFast.from_pretrained(SMOLLM)
    template = ChatTemplate(tok, system=system, now=NOW)
    history = [{"role": "system", "content": system}] if system else []
    ledger = template.head().ids
    for index, (question, answer) in enumerate([("Hi", "Hello!"), ("  spaces\n\n", "“ok” 日本"), ("", "x")]):
        asked = normalise(question)
        turn = template.turn(asked, ledger, first=not index, after_generated=bool(index), generation_prompt=True)
        check_tiles(turn, 1)
        ledger = ledger + turn.ids
        history.append({"role": "user", "content": question})
        assert ledger == tok.apply_chat_template(history, add_generation_prompt=True)["input_ids"]
        ledger = [*ledger, *tok.encode(answer, add_special_tokens=False), tok.eos_token_id]
        history.append({"role": "assistant", "content": answer})
