"""Streaming text: whole characters, stop strings, leading spaces."""

from __future__ import annotations

import time

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from agentkv.engine.detokenize import TextStream
from agentkv.errors import InvalidRequest


def bytes_tokenizer() -> Tokenizer:
    """One token a byte, and one special token."""
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    return raw


def sentencepiece_tokenizer() -> Tokenizer:
    """Words with a leading mark and byte fallback, as Llama 2."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Hello", "▁world", "x"]
    raw = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return raw


def ids_of(text: str) -> list[int]:
    return list(bytes_tokenizer().encode(text, add_special_tokens=False).ids)


def test_a_character_comes_whole_or_not_at_all() -> None:
    stream = TextStream(bytes_tokenizer())
    deltas = [stream.push(token).text for token in ids_of("a👋é")]
    assert deltas == ["a", "", "", "", "👋", "", "é"]
    assert stream.flush() == "" and stream.text == "a👋é"


def test_flush_says_what_is_broken() -> None:
    stream = TextStream(bytes_tokenizer())
    assert [stream.push(token).text for token in ids_of("👋")[:2]] == ["", ""]
    assert stream.flush() == "\ufffd" == stream.text
    assert [stream.push(token).text for token in ids_of("é")] == ["", "é"]


def test_a_stop_string_across_tokens_is_never_emitted() -> None:
    stream = TextStream(bytes_tokenizer(), ["\nUser:"])
    deltas = [stream.push(token) for token in ids_of("hi\nUse\nUser: no")]
    assert "".join(delta.text for delta in deltas) == "hi\nUse" == stream.text
    assert [delta.stopped for delta in deltas] == [False] * 11 + [True] * 4 and stream.stopped
    assert stream.flush() == ""


def test_what_might_have_been_a_stop_string_is_flushed() -> None:
    stream = TextStream(bytes_tokenizer(), ["abcd", "bcx"])
    assert "".join(stream.push(token).text for token in ids_of("zabc")) == "z"
    assert stream.flush() == "abc" and stream.text == "zabc" and not stream.stopped


def test_the_stop_string_that_is_complete_first_counts() -> None:
    stream = TextStream(bytes_tokenizer(), ["abcd", "bc"])
    assert "".join(stream.push(token).text for token in ids_of("abcd")) == "a"
    with pytest.raises(InvalidRequest, match="empty"):
        TextStream(bytes_tokenizer(), ["x", ""])


def test_special_tokens_have_text_only_when_asked() -> None:
    end = bytes_tokenizer().token_to_id("<|end|>")
    for skip, text in ((True, "ab"), (False, "a<|end|>b")):
        stream = TextStream(bytes_tokenizer(), skip_special=skip)
        for token in (*ids_of("a"), end, *ids_of("b")):
            stream.push(token)
        assert stream.text == text


def test_context_keeps_the_leading_space_of_a_sentencepiece_word() -> None:
    raw = sentencepiece_tokenizer()
    hello, world, x = (raw.token_to_id(word) for word in ("▁Hello", "▁world", "x"))
    alone, seeded = TextStream(raw), TextStream(raw, context=[x, x, hello])
    for stream in (alone, seeded):
        for token in (world, hello):
            stream.push(token)
    assert (alone.text, seeded.text) == ("world Hello", " world Hello")


def test_a_decoder_that_revises_itself_does_not_stop_the_stream() -> None:
    # A byte run decodes to replacement characters once a broken byte joins it, "é" included.
    raw = sentencepiece_tokenizer()
    bytes_ = [raw.token_to_id(f"<0x{byte:02X}>") for byte in (0xC3, 0xA9, 0xFF)]
    stream = TextStream(raw)
    text = "".join(stream.push(token).text for token in (*bytes_, raw.token_to_id("x")))
    assert text.startswith("é") and text.endswith("x")


def test_endless_broken_bytes_take_linear_time_and_space() -> None:
    raw = bytes_tokenizer()
    broken = next(i for i in range(256) if raw.decode([i]) == "\ufffd")
    stream = TextStream(raw)
    start = time.perf_counter()
    for _ in range(20_000):
        stream.push(broken)
    assert len(stream._window) < 40 and time.perf_counter() - start < 10
    stream.flush()
    assert stream.text == "\ufffd" * 20_000
