"""Forced calls: what a grammar lets through is what the parser reads as calls, and nothing else."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from chat_templates import NOW, QWEN_CODER, with_special
from tool_outputs import TEMPLATES
from transformers import PreTrainedTokenizerFast

from agentkv.engine.detokenize import TextStream
from agentkv.engine.grammars import Grammars
from agentkv.engine.matching import Matcher
from agentkv.engine.templates import ChatTemplate
from agentkv.engine.toolcalls import CallPart, Markup, Part
from agentkv.engine.toolcalls.choosing import ToolUse
from agentkv.errors import InvalidRequest, Unsupported
from agentkv.schemas.sampling import SamplingParams
from agentkv.schemas.tool_choice import ToolChoice


def tool(name: str, properties: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    schema = {} if properties is None else {"type": "object", "properties": properties, **more}
    return {"type": "function", "function": {"name": name, **({"parameters": schema} if schema else {})}}


PLACE = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["x"]}
TOOLS = [
    tool(
        "find",
        {
            "kind": {"enum": ["a } b", 'c "d"', "é"]},
            "count": {"type": "integer", "minimum": -5, "maximum": 500},
            "exact": {"type": "boolean"},
            "where": {"$ref": "#/$defs/place"},
            "many": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        },
        required=["kind", "where"],
        **{"$defs": {"place": PLACE}},
    ),
    tool("now", {}),
]
EXTRA = {
    "hermes": ("qwen3", ("<tool_call>", "</tool_call>"), None),
    "qwen-coder": ("qwen3", ("<tool_call>",), QWEN_CODER),
    "llama3": ("llama3", ("<|python_tag|>",), None),
    "mistral": ("mistral", (), None),
    "mistral named": ("mistral", ("[ARGS]",), None),
}


@cache
def model(form: str) -> PreTrainedTokenizerFast:
    family, extra, source = EXTRA[form]
    return with_special(family, extra, source)


def use(form: str, tools: Sequence[dict[str, Any]] = TOOLS) -> ToolUse:
    tokenizer = model(form)
    template = ChatTemplate(tokenizer, tools=list(tools), now=NOW)
    return ToolUse.of(template, tokenizer, tools, form.split()[0])


@cache
def grammars(form: str) -> Grammars:
    return Grammars(model(form), len(model(form)), {model(form).eos_token_id})


def matcher(form: str, choice: ToolChoice, tools: Sequence[dict[str, Any]] = TOOLS) -> Matcher:
    return grammars(form).start(use(form, tools).forced(choice, model(form)))


def walk(matcher: Matcher, end: int, rng: random.Random) -> list[int]:
    """Tokens of a random output. It ends where it may."""
    tokens: list[int] = []
    while not matcher.finished:
        allowed = torch.nonzero(matcher.allowed())[:, 0].tolist()
        tokens.append(end if end in allowed and rng.random() < 0.5 else rng.choice(allowed))
        matcher.advance(tokens[-1])
        assert len(tokens) < 2000
    return tokens


def read(form: str, tokens: Sequence[int], tools: Sequence[dict[str, Any]] = TOOLS) -> list[Part]:
    """What the session's parser makes of them."""
    used = use(form, tools)
    parser, stream = used.format.parser(used.tools, model(form)), TextStream(model(form), hidden=used.hidden)
    texts = [*(stream.push(token).text for token in tokens), stream.flush()]
    return [*(part for text in texts for part in parser.feed(text)), *parser.finish()]


@pytest.mark.parametrize("form", EXTRA)
def test_whatever_the_grammar_lets_through_is_read_as_calls_and_nothing_else(form: str, seed: int) -> None:
    rng = random.Random(seed)
    seen = set()
    for choice in [ToolChoice("required")] * 12 + [ToolChoice("required", "find")] * 4:
        tokens = walk(matcher(form, choice), model(form).eos_token_id, rng)
        parts = read(form, tokens)
        calls = [part for part in parts if isinstance(part, CallPart)]
        assert calls and all(isinstance(part, CallPart | Markup) for part in parts), parts
        for call in calls:
            seen.add(call.name)
            if call.name == "find":
                assert {"kind", "where"} <= call.arguments.keys() and 0 <= call.arguments["where"]["x"] <= 99
                assert call.arguments["kind"] in ("a } b", 'c "d"', "é")
                assert isinstance(call.arguments.get("exact", True), bool)
            else:
                assert call.arguments == {}
        if choice.name is not None:
            assert [call.name for call in calls] == ["find"]
    assert seen == {"find", "now"}


def test_a_tool_without_parameters_is_called_without_arguments(seed: int) -> None:
    for bare in (tool("now"), tool("now", {}), tool("now", {}, required=[])):
        tokens = walk(
            matcher("hermes", ToolChoice("required", "now"), [bare]), model("hermes").eos_token_id, random.Random(seed)
        )
        assert [part.arguments for part in read("hermes", tokens, [bare]) if isinstance(part, CallPart)] == [{}]


@pytest.mark.parametrize("form", ["hermes", "mistral", "mistral named", "qwen-coder"])
def test_required_allows_several_calls_and_a_name_exactly_one(form: str, seed: int) -> None:
    rng, end = random.Random(seed), model(form).eos_token_id
    counts = [
        [sum(isinstance(p, CallPart) for p in read(form, walk(matcher(form, choice), end, rng))) for _ in range(12)]
        for choice in (ToolChoice("required"), ToolChoice("required", "now"))
    ]
    assert max(counts[0]) > 1 and counts[1] == [1] * 12


def test_plain_strings_of_tagged_parameters_may_hold_anything_but_their_closing_tag() -> None:
    tools = [tool("say", {"text": {"type": "string", "description": "What."}}, required=["text"])]
    text = 'a "b"\n\n<c> </para> }\n'
    output = f"<tool_call>\n<function=say>\n<parameter=text>\n{text}\n</parameter>\n</function>\n</tool_call>"
    ids = model("qwen-coder").encode(output, add_special_tokens=False)
    begun = matcher("qwen-coder", ToolChoice("required"), tools)
    for token in ids:
        assert begun.allowed()[token]
        begun.advance(token)
    assert [part.arguments for part in read("qwen-coder", ids, tools) if isinstance(part, CallPart)] == [{"text": text}]


def test_what_cannot_be_forced_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="'pattern' of 'text' cannot be promised"):
        matcher("qwen-coder", ToolChoice("required"), [tool("say", {"text": {"type": "string", "pattern": "a+"}})])
    with pytest.raises(InvalidRequest, match=r"tool_choice for 'say'.*not") as refused:
        matcher("hermes", ToolChoice("required"), [tool("say", {"text": {"not": {}}})])
    assert refused.value.param == "tool_choice"
    template = ChatTemplate(model("hermes"), tools=TOOLS, now=NOW)
    with pytest.raises(Unsupported, match="'required' with the tool format 'text'"):
        ToolUse.of(template, model("hermes"), TOOLS, "text").forced(ToolChoice("required"), model("hermes"))


def test_a_response_template_is_forced_through_the_format_that_the_chat_template_writes_if_it_reads_that() -> None:
    tokenizer = with_special("qwen3", ())
    template = ChatTemplate(tokenizer, tools=TOOLS, now=NOW)
    tokenizer.response_template = TEMPLATES["qwen template"]
    agreeing = ToolUse.of(template, tokenizer, TOOLS)
    assert agreeing.format.name == "transformers" and agreeing.writer is not None
    assert agreeing.writer.name == "hermes"
    tokenizer.response_template = TEMPLATES["marked template"]
    with pytest.raises(Unsupported, match="'transformers'"):
        ToolUse.of(template, tokenizer, TOOLS).forced(ToolChoice("required"), tokenizer)


def test_tool_choices_are_read_as_openai_has_them_and_refused_with_what_is_known() -> None:
    parse = ToolChoice.parse
    assert parse(None) == parse("auto") == ToolChoice() and parse("none").mode == "none"
    openai = {"type": "function", "function": {"name": "now"}}
    assert parse(openai) == parse({"name": "now"}) == parse(parse(openai)) == ToolChoice("required", "now")
    wrong: list[Any] = ["any", 1, {}, {"name": 1}, {"name": "a", "x": 1}, {"type": "function", "function": {}}]
    for value in wrong:
        with pytest.raises(InvalidRequest, match='tool_choice: pass "auto", "none", "required"') as refused:
            parse(value)
        assert refused.value.param == "tool_choice"
    with pytest.raises(InvalidRequest, match="there is no tool 'then'; this session has: find, now"):
        parse({"name": "then"}).check(["now", "find"])
    with pytest.raises(InvalidRequest, match="has no tools"):
        parse("required").check([])
    for fine in ("auto", "none"):
        parse(fine).check([])
    assert SamplingParams.build(tool_choice=openai).tool_choice.name == "now"
    assert "required" in json.dumps(SamplingParams.model_json_schema()["properties"]["tool_choice"])
