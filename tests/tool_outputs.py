"""What models write when they call tools, well and badly: for each format, outputs and what is in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from agentkv.engine.toolcalls import TOOL_FORMATS, CallPart, Part, Schemas

__all__ = ["CASES", "FORMATS", "PIECES", "TEMPLATES", "TOOLS", "Case", "calls_of", "parse"]

TOOLS: Schemas = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "where": {"type": ["object", "null"]},
            "share": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "span": {"$ref": "#/$defs/span"},
        },
        "$defs": {"span": {"anyOf": [{"type": "array"}, {"$ref": "#/$defs/span"}]}},
    },
    "now": {},
}

# What transformers needs to read Qwen's calls, and calls in which names, strings and keys are written in another way.
_QWEN_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<\|im_end\|>", "content": "text"},
    },
}
_MARKED_TEMPLATE: dict[str, Any] = {
    "start_anchor": ["<|turn>model\n"],
    "fields": {
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": ["<tool_call|>", "<tool_call|><|tool_response>"],
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": ["<turn|>"], "content": "text"},
    },
}
_TAGGED_TEMPLATE: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>;*",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"content": "text"},
    },
}
TEMPLATES = {"qwen template": _QWEN_TEMPLATE, "marked template": _MARKED_TEMPLATE, "tagged template": _TAGGED_TEMPLATE}

FORMATS = ("hermes", "qwen-coder", "llama3", "mistral", *TEMPLATES)
"""Formats by name; a template's is that of ``transformers`` with it."""


@dataclass(frozen=True, slots=True)
class Case:
    """``output`` of a model in ``format``: it reads as ``text`` and ``calls``."""

    name: str
    format: str
    output: str
    text: str
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()

    def __str__(self) -> str:
        return f"{self.format}: {self.name}"


def parse(form: str, pieces: Iterable[str], *, prompt: str = "") -> list[Part]:
    """The parts of a reply that arrives in pieces, each text and each run of markup whole."""
    format_ = TOOL_FORMATS.get("transformers" if form in TEMPLATES else form)
    reading = format_.parser(TOOLS, SimpleNamespace(response_template=TEMPLATES.get(form)), prompt=prompt)
    parts = [part for piece in pieces for part in reading.feed(piece)]
    return _merged([*parts, *reading.finish()])


def _merged(parts: Sequence[Part]) -> list[Part]:
    """Neighbouring parts of text, and of markup, as one."""
    result: list[Part] = []
    for part in parts:
        assert part.raw or isinstance(part, CallPart), "an empty part says nothing"
        if result and type(part) is type(result[-1]) and not isinstance(part, CallPart):
            result[-1] = replace(part, raw=result[-1].raw + part.raw)
        else:
            result.append(part)
    return result


def _hermes(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def _tagged(name: str, arguments: Any) -> str:
    def text(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    parameters = "".join(f"<parameter={key}>\n{text(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def _llama(name: str, arguments: Any) -> str:
    return f'{{"name": "{name}", "parameters": {json.dumps(arguments)}}}'


def _tag(name: str, arguments: Any) -> str:
    return f"<|python_tag|>{_llama(name, arguments)}"


def _mistral_list(name: str, arguments: Any) -> str:
    return f'[TOOL_CALLS] [{{"name": "{name}", "arguments": {json.dumps(arguments)}, "id": "9aBcD0123"}}]'


def _mistral_named(name: str, arguments: Any) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}"


def _marked(name: str, arguments: Any) -> str:
    inside = ",".join(f'{key}:<|"|>{v}<|"|>' if isinstance(v, str) else f"{key}:{v}" for key, v in arguments.items())
    return f"<|tool_call>call:{name}{{{inside}}}<tool_call|>"


_WRITERS: dict[str, tuple[Callable[[str, Any], str], ...]] = {
    "hermes": (_hermes,),
    "qwen-coder": (_tagged,),
    "llama3": (_tag,),
    "mistral": (_mistral_list, _mistral_named),
    "qwen template": (_hermes,),
    "marked template": (_marked,),
    "tagged template": (_tagged,),
}

PARIS = {"city": "Paris"}
_STRINGS = {
    "braces": {"city": "a } { [ ] b"},
    "quotes": {"city": 'say "hi" \\ "'},
    "letters": {"city": "Zürich 東京 👋"},
    "lines": {"city": "one\ntwo\n\nthree"},
}


def _good(form: str) -> Iterable[Case]:
    """Calls as the format's models write them."""
    for number, write in enumerate(_WRITERS[form]):
        call, other = write("get_weather", PARIS), write("now", {})
        one, two = ("get_weather", PARIS), ("now", {})
        name = f" ({number})" if number else ""
        yield Case(f"one{name}", form, call, "", (one,))
        yield Case(f"text before{name}", form, f"I will look.\n\n{call}", "I will look.", (one,))
        yield Case(f"text after{name}", form, f"{call}\nThere.", "There.", (one,))
        yield Case(f"several{name}", form, f"{call}\n{other}{call}\n", "", (one, two, one))
        between = f"First {call} then {other} done"
        yield Case(f"text between{name}", form, between, "Firstthendone", (one, two))
        for kind, arguments in _STRINGS.items():
            if form == "marked template" and kind == "quotes":
                continue  # its strings have no escapes
            yield Case(f"{kind}{name}", form, write("get_weather", arguments), "", (("get_weather", arguments),))
        typed = {"city": "x", "days": 3}
        yield Case(f"types{name}", form, write("get_weather", typed), "", (("get_weather", typed),))


def _bad(form: str) -> Iterable[Case]:
    """What is no call, and stays text to the letter; the call behind it is found."""
    for number, write in enumerate(_WRITERS[form]):
        call = write("get_weather", PARIS)
        name = f" ({number})" if number else ""
        yield Case(f"nothing{name}", form, "", "")
        yield Case(f"unknown tool{name}", form, write("launch", PARIS), write("launch", PARIS))
        start = call[: call.index("get_weather") + 4]
        if not form.endswith("template"):
            # White space behind a bare name might still lead to its arguments, so it is read with it.
            kept = "\n\n" if write is _mistral_named else ""
            yield Case(f"begun again{name}", form, f"{start}\n\n{call}", start + kept, (("get_weather", PARIS),))


_ESCAPES = r'{"name": "get_weather", "arguments": {"city": "\ud83d\udc4b \u00e9 \"\\ \/ \b\f\n\r\t"}}'
_ESCAPED = {"city": '👋 é "\\ / \b\f\n\r\t'}
_BROKEN_JSON = {
    "no brace": '{"name": "now", "arguments": {}',
    "trailing comma": '{"name": "now", "arguments": {},}',
    "single quotes": "{'name': 'now'}",
    "no quotes": "{name: now}",
    "raw newline in a string": '{"name": "now", "arguments": {"a": "x\ny"}}',
    "not a number": '{"name": "now", "arguments": {"a": NaN}}',
    "infinite": '{"name": "now", "arguments": {"a": 1e999}}',
    "leading zero": '{"name": "now", "arguments": {"a": 01}}',
    "number without end": '{"name": "now", "arguments": {"a": 1.}}',
    "half a surrogate pair": '{"name": "now", "arguments": {"a": "\\ud800"}}',
    "bad escape": '{"name": "now", "arguments": {"a": "\\x"}}',
    "bad hex": '{"name": "now", "arguments": {"a": "\\u00g0"}}',
    "wrong bracket": '{"name": "now", "arguments": {"a": [1}]}',
    "misspelt literal": '{"name": "now", "arguments": {"a": trve}}',
    "arguments that are a list": '{"name": "now", "arguments": [1]}',
    "arguments that are text": '{"name": "now", "arguments": "today"}',
    "arguments twice": '{"name": "now", "arguments": {}, "parameters": {}}',
    "name of another kind": '{"name": 7, "arguments": {}}',
    "no name": '{"arguments": {}}',
    "a list": '["now"]',
    "nothing": "",
    "digits": '{"name": "now", "arguments": {"a": ' + "9" * 5000 + "}}",
    "depth": '{"name": "now", "arguments": {"a": ' + "[" * 200 + "]" * 200 + "}}",
}
_FINE_JSON = {
    "escapes": (_ESCAPES, ("get_weather", _ESCAPED)),
    "white space": (' \t\r\n{ "name" :\n"now" , "arguments" : { } }\n ', ("now", {})),
    "no arguments": ('{"name": "now"}', ("now", {})),
    "parameters": ('{"name": "now", "parameters": {"a": [1, -2.5e-3, 0, true, false, null, {}]}}',
                   ("now", {"a": [1, -2.5e-3, 0, True, False, None, {}]})),
    "arguments in a string": ('{"name": "now", "arguments": "{\\"a\\": 1}"}', ("now", {"a": 1})),
    "another key": ('{"name": "now", "arguments": {}, "why": "because"}', ("now", {})),
}  # fmt: skip


def calls_of(form: str) -> list[str]:
    """One call, in each way in which the format writes it."""
    return [write("get_weather", PARIS) for write in _WRITERS[form]]


def _json(form: str, wrap: Callable[[str], str]) -> Iterable[Case]:
    """JSON in all states, in the format's frame."""
    for kind, (text, call) in _FINE_JSON.items():
        yield Case(kind, form, wrap(text), "", (call,))
    for kind, text in _BROKEN_JSON.items():
        yield Case(kind, form, wrap(text), wrap(text))


def _all() -> Iterable[Case]:
    for form in FORMATS:
        yield from _good(form)
        yield from _bad(form)
    yield from _json("hermes", lambda text: f"<tool_call>{text}</tool_call>")
    yield from _json("llama3", lambda text: f"<|python_tag|>{text}")
    yield from _json("mistral", lambda text: f"[TOOL_CALLS][{text}]")
    yield from _special()


def _special() -> Iterable[Case]:
    now = ("now", {})
    hermes = _hermes("now", {})
    yield Case("text alone", "hermes", "a < b <tool> <tool_cal", "a < b <tool> <tool_cal")
    yield Case("space alone", "hermes", " \n" * 100, " \n" * 100)
    yield Case("much space", "hermes", "a" + "\n" * 100 + hermes, "a" + "\n" * 36, (now,))
    yield Case("opened twice", "hermes", f"<tool_call>\n{hermes}", "<tool_call>\n", (now,))
    yield Case("closed by another", "hermes", f"<tool_call>{{}}</tool_{hermes}", "<tool_call>{}</tool_", (now,))
    inner = '<tool_call>{"name": "now"}</tool_call>'
    quoted = _hermes("launch", {"a": "<tool_call>"})
    yield Case("a marker in an unknown tool's string", "hermes", f"{quoted} {inner}", quoted, (now,))
    yield Case("a marker in a string", "hermes", _hermes("now", {"a": inner}), "", (("now", {"a": inner}),))
    yield Case("text behind an object", "hermes", "<tool_call>{} and</tool_call>", "<tool_call>{} and</tool_call>")

    bare, other = _llama("now", {}), _llama("get_weather", PARIS)
    yield Case("bare", "llama3", bare, "", (now,))
    yield Case("bare behind space", "llama3", f"\n\n {bare}", "", (now,))
    yield Case("bare, several", "llama3", f"{bare}; {other};{bare}\n", "", (now, ("get_weather", PARIS), now))
    yield Case("bare, then text", "llama3", f"{bare} done", "done", (now,))
    yield Case("bare, then a semicolon", "llama3", f"{bare} ;", ";", (now,))
    yield Case(
        "bare, then another tool", "llama3", f"{bare}; {_llama('launch', {})}", f"; {_llama('launch', {})}", (now,)
    )
    yield Case("not at the start", "llama3", f"So: {bare}", f"So: {bare}")
    yield Case("JSON as an answer", "llama3", '{"name": "now", "age": 3}', '{"name": "now", "age": 3}')
    yield Case("JSON with a key more", "llama3", bare[:-1] + ', "age": 3}', bare[:-1] + ', "age": 3}')
    yield Case("bare and typed", "llama3", bare[:-1] + ', "type": "function"}', "", (now,))
    yield Case("bare, unknown", "llama3", _llama("launch", {}), _llama("launch", {}))
    yield Case("bare, cut off", "llama3", bare[:-1], bare[:-1])
    yield Case("code", "llama3", "<|python_tag|>import os", "<|python_tag|>import os")
    yield Case("a brace", "llama3", "{ is a brace", "{ is a brace")

    named = "[TOOL_CALLS]now[CALL_ID]123abc456[ARGS]{}"
    yield Case("with an id", "mistral", named, "", (now,))
    yield Case("without [ARGS]", "mistral", "[TOOL_CALLS]now{}", "", (now,))
    yield Case("words", "mistral", "[TOOL_CALLS]now and then", "[TOOL_CALLS]now and then")
    yield Case("half a marker", "mistral", "[TOOL_CALLS]now[AR{}", "[TOOL_CALLS]now[AR{}")
    yield Case("an id and no arguments", "mistral", "[TOOL_CALLS]now[CALL_ID]1{}", "[TOOL_CALLS]now[CALL_ID]1{}")
    pair = '[TOOL_CALLS][{"name": "now"}, {"name": "get_weather", "arguments": {"city": "Paris"}}]'
    yield Case("a list of two", "mistral", f"{pair}\n", "", (now, ("get_weather", PARIS)))
    yield Case("a list cut off", "mistral", '[TOOL_CALLS][{"name": "now"}, {"na', ', {"na', (now,))
    yield Case("a list that breaks", "mistral", '[TOOL_CALLS][{"name": "now"} oh', "oh", (now,))
    yield Case(
        "an unknown tool among others",
        "mistral",
        '[TOOL_CALLS][{"name": "now"}, {"name": "launch"}, {"name": "now"}]',
        ', {"name": "launch"}',
        (now, now),
    )
    yield Case("an empty list", "mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]")
    yield Case("unknown tools alone", "mistral", '[TOOL_CALLS][{"name": "x"}]', '[TOOL_CALLS][{"name": "x"}]')

    def tagged(key: str, value: str) -> str:
        return f"<tool_call><function=get_weather><parameter={key}>{value}</parameter></function></tool_call>"

    for form in ("qwen-coder", "tagged template"):
        for key, text, value in (
            ("days", "3", 3),
            ("days", "many", "many"),
            ("exact", "true", True),
            ("exact", "maybe", "maybe"),
            ("city", "3", "3"),
            ("where", '{"a": [1]}', {"a": [1]}),
            ("where", "null", None),
            ("share", "0.5", 0.5),
            ("share", "null", None),
            *([("span", "[1, 2]", [1, 2])] if form == "qwen-coder" else []),
            ("other", "3", "3"),
            ("city", "a <b> </param> c", "a <b> </param> c"),
        ):
            yield Case(f"{key} of {text}", form, tagged(key, text), "", (("get_weather", {key: value}),))
    lines = "\nfirst\n\n  last\n\n"
    kept = (("get_weather", {"city": "first\n\n  last\n"}),)
    yield Case("lines as they are", "qwen-coder", tagged("city", lines), "", kept)
    broken = "<tool_call><function=get_weather><parameter=city>x</function></tool_call>"
    yield Case("a parameter not closed", "qwen-coder", broken, broken)

    marked = _marked("now", {})
    yield Case("closed by a pattern that goes on", "tagged template", f"{_tagged('now', {})};; so", "so", (now,))
    yield Case("closed at length", "marked template", f"{marked}<|tool_response>", "", (now,))
    yield Case("closed at half length", "marked template", f"{marked}<|tool_resp", "<|tool_resp", (now,))

    thinking = f"<think>\nshould I {_hermes('now', {})}?\n</think>\n\n"
    for form in ("qwen template", "tagged template"):
        write = _WRITERS[form][0]
        yield Case("a call in thoughts", form, thinking + write("now", {}), thinking.rstrip(), (now,))
    for kind, text in _BROKEN_JSON.items():
        frame = f"<tool_call>{text}</tool_call>"
        yield Case(kind, "qwen template", f"{frame} {inner}", frame, (now,))


PIECES = {
    "hermes": ("<tool_call>", "</tool_call>", '{"name": "now", "arguments": {', "}}", '"', "\\", "\n", "a", "<", ":",
               ","),
    "qwen-coder": ("<tool_call>", "<function=now>", "<parameter=a>", "</parameter>", "</function>", "</tool_call>",
                   "\n", "a", "<", "</"),
    "llama3": ("<|python_tag|>", '{"name": "now", "parameters": {', "}}", ";", '"', "\\", " ", "a", "<|", ":", ","),
    "mistral": ("[TOOL_CALLS]", "[", "]", '{"name": "now"}', "now", "[ARGS]", "[CALL_ID]", "{}", '"', ",", " ", "a"),
    "qwen template": ("<tool_call>", "</tool_call>", '{"name": "now", "arguments": {', "}}", "<think>", "</think>",
                      "\n", "a", "<"),
    "marked template": ("<|tool_call>", "call:now", "{", "}", "<tool_call|>", '<|"|>', "a:", "\n", "<", "x"),
    "tagged template": ("<tool_call>", "<function=now>", "<parameter=a>", "</parameter>", "</function>", "</tool_call>",
                        "<think>", "</think>", "\n", "a", "<"),
}  # fmt: skip
"""What outputs of each format are made of."""

CASES = tuple(_all())
