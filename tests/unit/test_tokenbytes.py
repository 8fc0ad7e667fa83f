"""Tokens, each by itself, add up to the text."""

from __future__ import annotations

import pytest
from chat_templates import tokenizer

from agentkv.engine.tokenbytes import token_bytes

TEXT = "Zoë says: 🙂\n  {'a': 1}\tÀ bientôt!"


@pytest.mark.parametrize(("kind", "before"), [("byte", ""), ("words", " ")])
def test_the_bytes_of_a_texts_tokens_are_the_text(kind: str, before: str) -> None:
    made = tokenizer("gemma", kind)
    ids = made.encode(TEXT, add_special_tokens=False)
    pieces = [token_bytes(made).of(token) for token in ids]
    assert b"".join(pieces) == (before + TEXT).encode()
    assert any(len(piece) == 1 and piece >= b"\x80" for piece in pieces), "no character is in parts"
    assert token_bytes(made).of(made.convert_tokens_to_ids("<end_of_turn>")) == b"<end_of_turn>"
    assert token_bytes(made).of(len(made) + 5) == b""
