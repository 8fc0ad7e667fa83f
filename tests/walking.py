"""Outputs without a model: whatever a matcher allows is drawn, with a leaning towards what ends soon."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

from homes import byte_tokenizer
from tokenizers import Tokenizer

from agentkv.engine.encode import backend_of
from agentkv.engine.grammars import Grammars
from agentkv.engine.matching import Matcher
from agentkv.schemas.constraints import Constraint

__all__ = ["END", "WIDTH", "grammars", "tokens_of", "walk", "walked"]

WIDTH = 327
"""Columns of the logits: more than the tokenizer has tokens."""


@cache
def _backend() -> Tokenizer:
    return backend_of(byte_tokenizer())


END = int(byte_tokenizer().eos_token_id)
_CLOSING = '"}]'


@cache
def grammars() -> Grammars:
    """Of the tests' tiny byte-level tokenizer."""
    return Grammars(byte_tokenizer(), WIDTH, [END])


def tokens_of(text: str) -> list[int]:
    """The text as tokens, none of them special."""
    return list(_backend().encode(text, add_special_tokens=False).ids)


def walk(matcher: Matcher, seed: int, *, patience: int = 120) -> Iterator[int]:
    """Tokens that the matcher allowed, until the output is whole. After ``patience`` tokens it hurries to end."""
    draw = random.Random(seed)
    closing = [token for sign in _CLOSING for token in tokens_of(sign)]
    for count in range(8 * patience):
        allowed = [int(token) for token in matcher.allowed().nonzero()]
        ends = [token for token in closing if token in allowed]
        if END in allowed and (count > patience or draw.random() < 0.3):
            token = END
        elif ends and (count > patience or draw.random() < 0.4):
            token = ends[0]
        else:
            token = draw.choice(allowed)
        matcher.advance(token)
        yield token
        if matcher.finished:
            return


def walked(constraint: Constraint, seed: int) -> str | None:
    """One output as text; ``None`` where it did not come to an end."""
    matcher = grammars().start(constraint)
    tokens = list(walk(matcher, seed))
    return grammars().text(tokens) if matcher.finished else None
