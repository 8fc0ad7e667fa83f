"""Tool calls parse the same whole and in pieces, however the text is cut, and no character is lost."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tool_outputs import CASES, FORMATS, PIECES, Case, calls_of, parse

from agentkv.engine.toolcalls import CallPart, TextPart

EVERY_SPLIT = 400
"""Longer outputs are cut in two at a sample of places."""


def cut(text: str, places: list[int]) -> list[str]:
    """``text`` in pieces."""
    ends = sorted({0, len(text), *places})
    return [text[a:b] for a, b in pairwise(ends)]


@pytest.mark.short(70)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_output_reads_the_same_at_every_chunk_boundary(case: Case) -> None:
    whole = parse(case.format, [case.output])
    assert "".join(part.raw for part in whole) == case.output
    assert parse(case.format, list(case.output)) == whole
    step = 1 + len(case.output) // EVERY_SPLIT
    for place in range(1, len(case.output), step):
        assert parse(case.format, [case.output[:place], case.output[place:]]) == whole, place


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_output_reads_as_its_text_and_its_calls(case: Case) -> None:
    parts = parse(case.format, [case.output])
    calls = tuple((part.name, part.arguments) for part in parts if isinstance(part, CallPart))
    assert calls == case.calls
    assert "".join(part.raw for part in parts if isinstance(part, TextPart)) == case.text


@pytest.mark.parametrize("form", FORMATS)
def test_a_call_that_is_cut_off_anywhere_is_text(form: str) -> None:
    for call in calls_of(form):
        # The bracket that closes a list is no part of its calls.
        for stop in range(1, len(call.removesuffix("]"))):
            for pieces in ([call[:stop]], list(call[:stop])):
                assert parse(form, pieces) == [TextPart(call[:stop])], stop


@pytest.mark.short(3)
@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=150)
@given(data=st.data())
def test_any_output_in_any_pieces_reads_the_same_and_loses_nothing(form: str, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(PIECES[form]) | st.characters(), max_size=20))
    text = "".join(chosen)
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    whole = parse(form, [text])
    assert "".join(part.raw for part in whole) == text
    assert parse(form, cut(text, places)) == whole
    assert parse(form, list(text)) == whole


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=60)
@given(
    data=st.data(),
    edits=st.lists(
        st.tuples(st.integers(0, 10_000), st.sampled_from(["", '"', "}", "<", "\\", "\n", "a"])), max_size=3
    ),
)
@example(data=None, edits=[])
def test_a_good_output_with_letters_changed_never_raises_and_loses_nothing(
    form: str, data: st.DataObject | None, edits: list[tuple[int, str]]
) -> None:
    good = [case.output for case in CASES if case.format == form and case.calls]
    text = good[0] if data is None else data.draw(st.sampled_from(good))
    for place, letter in edits:
        at = place % (len(text) + 1)
        text = text[:at] + letter + text[at + 1 :]
    whole = parse(form, [text])
    assert "".join(part.raw for part in whole) == text
    assert parse(form, list(text)) == whole


def adversarial(form: str, length: int) -> list[str]:
    """Outputs that would be read again and again by a parser that starts over."""
    pieces = PIECES[form]
    call = calls_of(form)[0]
    opened = call[: call.index("Paris")]
    repeated = ["\n", pieces[0], "".join(pieces), opened, call, pieces[0] + " x", opened + "\n"]
    long_call = call.replace("Paris", "P" * length)
    return [*(text * (length // len(text)) for text in repeated), long_call]


@pytest.mark.short(2)
@pytest.mark.parametrize("form", FORMATS)
def test_time_is_linear_in_the_output(form: str) -> None:
    length = 20_000
    for text in adversarial(form, length):
        for pieces in ([text], list(text)):
            start = time.process_time()
            parts = parse(form, pieces)
            seconds = time.process_time() - start
            assert seconds < 2, (text[:40], len(pieces))
            assert sum(len(part.raw) for part in parts) == len(text)
