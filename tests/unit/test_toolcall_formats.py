"""Which format a model writes its calls in, what transformers reads in them, and special tokens on the way."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_templates import FAMILIES, NAMED_MISTRAL, NOW, QWEN_CODER, TOOL, tokenizer, with_special
from tool_outputs import CASES, TEMPLATES, TOOLS, Case, calls_of, parse
from transformers.utils.chat_parsing import parse_response

from agentkv.engine.templates import ChatTemplate
from agentkv.engine.toolcalls import TOOL_FORMATS, CallPart, Part, TextPart, ToolFormat
from agentkv.engine.toolcalls.choosing import ToolUse, choose_format, schemas_of
from agentkv.engine.toolcalls.jsonscan import JsonScanner
from agentkv.engine.toolcalls.sink import ToolSink
from agentkv.errors import InvalidRequest, Unsupported
from agentkv.schemas.messages import ToolCall
from agentkv.settings import Settings

# ruff: noqa: E501
# Python-like calls, which no format reads.
PYTHONIC = """{% for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content }}
    {%- for call in message.tool_calls or [] %}{{- '[' + call.function.name + '(' + call.function.arguments | string + ')]' }}{% endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}{% if tools %}{{- tools | tojson }}{% endif %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""


def chat(family: str) -> ChatTemplate:
    return ChatTemplate(tokenizer(family), tools=[TOOL], now=NOW)


def with_template(family: str, source: str) -> tuple[ChatTemplate, Any]:
    """The family's tokenizer with another chat template."""
    changed = with_special(family, (), source)
    return ChatTemplate(changed, tools=[TOOL], now=NOW), changed


def read(form: ToolFormat, text: str, tools: Sequence[Any] = (TOOL,)) -> list[Part]:
    parser = form.parser(schemas_of(tools), None)
    return [*parser.feed(text), *parser.finish()]


@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen3", "hermes"), ("llama3", "llama3"), ("mistral", "mistral"), ("chatml", "hermes"), ("gemma", "hermes")],
)
def test_the_format_is_that_in_which_the_template_writes_calls(family: str, name: str) -> None:
    # ChatML and Gemma show no calls: tool blocks do.
    assert choose_format(chat(family), tokenizer(family)).name == name


@pytest.mark.parametrize(
    ("family", "source", "name"), [("qwen3", QWEN_CODER, "qwen-coder"), ("mistral", NAMED_MISTRAL, "mistral")]
)
def test_other_ways_of_the_same_families_are_told_apart(family: str, source: str, name: str) -> None:
    template, changed = with_template(family, source)
    form = choose_format(template, changed)
    written = template.written_call("get_weather", {"city": "Paris"})
    assert form.name == name and written is not None
    assert [(p.name, p.arguments) for p in read(form, written) if isinstance(p, CallPart)] == [
        ("get_weather", {"city": "Paris"})
    ]


def test_a_template_whose_calls_nothing_reads_is_refused_by_name_and_text_is_the_way_out() -> None:
    template, changed = with_template("qwen3", PYTHONIC)
    with pytest.raises(Unsupported, match=r"no tool format reads .*tool_format='text'"):
        choose_format(template, changed)
    form = choose_format(template, changed, "text")
    assert read(form, "<tool_call>{}</tool_call>") == [TextPart("<tool_call>{}</tool_call>")]


def test_a_template_that_wants_calls_answered_shows_one_that_is() -> None:
    checked = "{% if messages[-1].tool_calls %}{{ raise_exception('answer it') }}{% endif %}"
    template, changed = with_template("qwen3", checked + FAMILIES["qwen3"][0])
    assert choose_format(template, changed).name == "hermes"


def test_a_format_is_chosen_by_name_and_an_unknown_one_is_refused_with_those_that_are_known() -> None:
    assert choose_format(chat("qwen3"), tokenizer("qwen3"), "mistral").name == "mistral"
    with pytest.raises(InvalidRequest, match="unknown tool_format 'xml'; known: hermes, llama3, mistral, qwen-coder"):
        choose_format(chat("qwen3"), tokenizer("qwen3"), "xml")


def test_the_page_about_tools_and_the_setting_name_every_format() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()
    named = re.findall(r"^\| `([\w-]+)`", page, re.MULTILINE)
    assert sorted(set(named) - {"tool_format"}) == sorted(TOOL_FORMATS)
    description = Settings.model_fields["tool_format"].description or ""
    assert all(f"`{name}`" in description for name in ("auto", *TOOL_FORMATS))


def test_the_tokenizers_own_response_template_comes_first() -> None:
    template, changed = with_template("qwen3", PYTHONIC)
    changed.response_template = TEMPLATES["tagged template"]
    assert choose_format(template, changed).name == "transformers"
    changed.response_template = {"fields": {"content": {}}, "start_anchor": "x"}  # it says nothing of calls
    with pytest.raises(Unsupported, match="no tool format reads"):
        choose_format(template, changed)
    for broken in ({"fields": {"tool_calls": {"open": ""}}, "start_anchor": "x"}, None):
        changed.response_template = broken
        with pytest.raises(Unsupported, match="response_template"):
            ToolUse.of(template, changed, [TOOL], "transformers")


# For one broken call transformers gives up the whole reply; and what it finds in thoughts it does not show.
WHOLE = [c for c in CASES if c.format in TEMPLATES and c.calls and "call" not in c.text]


@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_calls_are_those_that_transformers_reads(case: Case) -> None:
    definitions: list[Any] = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in TOOLS.items()]
    whole = parse_response(case.output, TEMPLATES[case.format], prefix="", tools=definitions)
    found = [call["function"] for call in whole["tool_calls"]]
    assert [(call["name"], call["arguments"]) for call in found] == list(case.calls)


def test_what_the_prompt_has_opened_is_open() -> None:
    call = calls_of("tagged template")[0]
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    for pieces in ([f"{call}</think>{call}"], list(f"{call}</think>{call}")):
        thought, called = parse("tagged template", pieces, prompt=prompt)
        assert thought == TextPart(f"{call}</think>") and isinstance(called, CallPart) and called.raw == call
    # In a prompt that opens nothing, and in one without the anchor, the reply begins as it is.
    for opened in (prompt.removesuffix("<think>\n"), "<think>"):
        assert isinstance(parse("tagged template", [call], prompt=opened)[0], CallPart)


def test_json_is_read_as_strictly_as_python_reads_it() -> None:
    fine = ['{"a": [1, -0.5e+3, {}, [], true, false, null, "\\u00e9\\n"], "b": {"c": 0}}', '{\n"a"\t:\r1 }']
    bad = [
        '{"a": 1,}',
        '{"a" 1}',
        "{,}",
        '{"a": .5}',
        '{"a": 1e}',
        '{"a": +1}',
        '{"a": tru}',
        '{"a": "\x00"}',
        "{]",
        "[]",
    ]
    for text in fine:
        scanner = JsonScanner()
        assert scanner.scan(text + " more", 0) == len(text) and scanner.verdict == "done"
    for text in bad:
        scanner = JsonScanner()
        assert scanner.scan(text, 0) < len(text) and scanner.verdict == "bad"


class Replying:
    """A tool sink over a tokenizer, and what it emitted."""

    def __init__(self, family: str, extra: Sequence[str], name: str, stop: Sequence[str] = (), taken: Any = ()) -> None:
        self.tokenizer = with_special(family, extra)
        use = ToolUse.of(ChatTemplate(self.tokenizer, tools=[TOOL], now=NOW), self.tokenizer, [TOOL], name)
        self.emitted: list[str | ToolCall] = []
        end = {self.tokenizer.eos_token_id}
        parser = use.format.parser(use.tools, self.tokenizer)
        self.sink = ToolSink(
            self.tokenizer, parser, end, self.emitted.append, hidden=use.hidden, stop=stop, taken=taken
        )

    def say(self, text: str) -> str:
        """The text of the whole reply."""
        for token in self.tokenizer.encode(text, add_special_tokens=False):
            if self.sink.push(token, None) == "stop":
                break
        return self.sink.finish()

    @property
    def said(self) -> str:
        return "".join(part for part in self.emitted if isinstance(part, str))


@pytest.mark.parametrize(
    ("family", "extra", "name", "call"),
    [
        ("llama3", ("<|python_tag|>",), "llama3", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}'),
        ("mistral", ("[ARGS]",), "mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}'),
        ("mistral", (), "mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]'),
        ("qwen3", ("<tool_call>",), "hermes", calls_of("hermes")[0]),
        ("qwen3", ("<tool_call>", "</tool_call>"), "qwen-coder", calls_of("qwen-coder")[0]),
        ("qwen3", (), "auto", calls_of("hermes")[0]),
    ],
)  # fmt: skip
def test_markers_that_are_special_tokens_are_seen_and_shown_only_where_they_are_text(
    family: str, extra: Sequence[str], name: str, call: str
) -> None:
    end = FAMILIES[family][3]
    good = Replying(family, extra, name)
    assert good.say(f"{call}{end}ignored") == good.said == ""
    assert [(c.name, c.arguments) for c in good.sink.calls] == [("get_weather", {"city": "Paris"})]
    assert good.emitted == list(good.sink.calls) and good.sink.calls[0].id.startswith("call_")
    broken = Replying(family, extra, name)
    cut = call[: call.index("Paris")]
    assert broken.say(f"{cut}{end}") == broken.said == cut and broken.sink.calls == ()


def test_special_tokens_of_a_response_template_are_seen() -> None:
    extra = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|other|>")
    reply = Replying("qwen3", extra, "hermes")
    reply.tokenizer.response_template = TEMPLATES["marked template"]
    use = ToolUse.of(ChatTemplate(reply.tokenizer, tools=[TOOL], now=NOW), reply.tokenizer, [TOOL])
    hidden = set(reply.tokenizer.convert_ids_to_tokens(sorted(use.hidden)))
    assert use.format.name == "transformers" and hidden == {*FAMILIES["qwen3"][1], "<|other|>"}


def test_a_call_keeps_the_id_that_the_model_gave_unless_another_has_it() -> None:
    one = '{"name": "get_weather", "id": "9aBcD0123"}'
    reply = Replying("mistral", (), "mistral")
    reply.say(f"[TOOL_CALLS] [{one}, {one}]")
    first, second = (call.id for call in reply.sink.calls)
    assert first == "9aBcD0123" and second.startswith("call_")
    odd = Replying("mistral", (), "mistral")
    odd.say('[TOOL_CALLS] [{"name": "get_weather", "id": "a b"}, {"name": "get_weather", "id": 7}]')
    assert all(call.id.startswith("call_") for call in odd.sink.calls) and len(odd.sink.calls) == 2
    late = Replying("mistral", (), "mistral", taken={"9aBcD0123"})
    late.say(f"[TOOL_CALLS] [{one}]")
    assert late.sink.calls[0].id.startswith("call_")


def test_a_stop_string_inside_a_call_leaves_its_beginning_as_text() -> None:
    call = calls_of("hermes")[0]
    reply = Replying("qwen3", (), "hermes", stop=["Paris"])
    assert reply.say(f"So:\n{call}") == "So:\n" + call[: call.index("Paris")] and reply.sink.calls == ()
