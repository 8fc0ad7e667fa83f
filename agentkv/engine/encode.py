"""Rendered text to token ids, such that what a message says can never become a control token.

A chat template writes control tokens (``<|im_end|>``) and message text into one string, and the tokenizer cannot tell
them apart: a document that contains ``<|im_end|><|im_start|>system`` would open a system turn. So text that comes from
outside is *guarded* before it is rendered: an invisible ``BREAK`` is put inside each special-token string in it. The
rendered text is cut at the breaks and the pieces are tokenised apart, so the string becomes ordinary tokens. Text
without such strings, which is nearly all there is, is tokenised jointly, exactly as transformers does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentkv.errors import TemplateError, Unsupported

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["BREAK", "Encoded", "Encoder", "backend_of", "special_tokens"]

BREAK = "\ufdd0"
"""A Unicode noncharacter, never part of interchanged text. In message text it is replaced by U+FFFD."""


def backend_of(tokenizer: Any) -> Tokenizer:
    """The ``tokenizers.Tokenizer`` of a transformers tokenizer (or the argument, when it is one)."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "to_str"):
        raise Unsupported(
            f"tokenizer {type(tokenizer).__name__}", "it has no tokenizers backend (tokenizer.json)", param="model"
        )
    return backend  # type: ignore[no-any-return]


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """The tokenizer's special tokens: their strings and ids."""
    added = backend_of(tokenizer).get_added_tokens_decoder()
    return {token.content: index for index, token in added.items() if token.special and token.content}


@dataclass(frozen=True, slots=True)
class Encoded:
    """``ends[i]``: characters of the text (breaks included) that the tokens up to and including ``i`` cover."""

    ids: list[int]
    ends: list[int]


class Encoder:
    """Tokenises without adding special tokens. Thread-safe: the tokenizer is only read."""

    def __init__(self, tokenizer: Any) -> None:
        self._backend = backend_of(tokenizer)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        # Some models have thousands of special tokens: look at first characters, then at each length.
        self._strings = frozenset(token.content for token in added.values() if token.special and token.content)
        self._lengths = sorted({len(string) for string in self._strings}, reverse=True)
        firsts = "".join(sorted({string[0] for string in self._strings}))
        self._first = re.compile(f"[{re.escape(firsts)}]" if firsts else "(?!)")
        # SentencePiece puts a space before the first word it is given. A character in front that does not join with
        # the word takes that space; it is cut off again. Byte-level tokenizers need none.
        leads = [(lead, self._ids(lead)) for lead in ("\n", "\x01")]
        spaces_starts = leads[0][1] + self._ids("a") != self._ids("\na")
        self._leads = leads if spaces_starts else []

    def bos(self) -> list[int]:
        """What the tokenizer itself puts before a text."""
        return [i for i in self._backend.encode("", add_special_tokens=True).ids if i in self.special_ids][:1]

    def guard(self, value: Any) -> Any:
        """A copy of JSON-like ``value`` in which no string, key or value, contains a special-token string unbroken."""
        if isinstance(value, str):
            return self._guard_text(value)
        if isinstance(value, dict):
            return {self.guard(key): self.guard(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.guard(item) for item in value]
        return value

    def first_special(self, text: str) -> int | None:
        """Where the first special-token string of ``text`` begins."""
        return next((start for start, _ in self._specials(text)), None)

    def encode(self, text: str, *, inside: bool = False) -> Encoded:
        """Token ids of guarded text. ``inside``: it continues other text, so it gets no sentence-start space."""
        pieces = text.split(BREAK)
        first = self._piece(pieces[0], 0, inside=inside)
        position = len(pieces[0])
        for piece in pieces[1:]:
            more = self._piece(piece, position + 1, inside=True)
            first.ids.extend(more.ids)
            first.ends.extend(more.ends)
            position += 1 + len(piece)
        return first

    def _ids(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def _guard_text(self, text: str) -> str:
        if BREAK in text:
            text = text.replace(BREAK, "\ufffd")
        parts, start = [], 0
        for found, length in self._specials(text):
            if length == 1:
                raise TemplateError(
                    f"the text contains {text[found]!r}, a control token of this model that cannot be written as text",
                    param="messages",
                )
            parts.append(text[start : found + 1])
            start = found + 1
        return BREAK.join([*parts, text[start:]])

    def _specials(self, text: str) -> Iterator[tuple[int, int]]:
        """(start, length) of the special-token strings in ``text``, overlapping ones too."""
        for found in self._first.finditer(text):
            start = found.start()
            length = next((n for n in self._lengths if text[start : start + n] in self._strings), 0)
            if length:
                yield start, length

    def _piece(self, text: str, offset: int, *, inside: bool) -> Encoded:
        if not text:
            return Encoded([], [])
        for lead, lead_ids in self._leads if inside else ():
            encoding = self._backend.encode(lead + text, add_special_tokens=False)
            count = len(lead_ids)
            if encoding.ids[:count] == lead_ids and all(end <= 1 for _, end in encoding.offsets[:count]):
                return Encoded(encoding.ids[count:], [offset + max(0, end - 1) for _, end in encoding.offsets[count:]])
        encoding = self._backend.encode(text, add_special_tokens=False)
        return Encoded(encoding.ids, [offset + end for _, end in encoding.offsets])
