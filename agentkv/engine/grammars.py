"""Grammars of one model: its tokenizer's tables, made once, and what was compiled with them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any

from agentkv.engine.encode import backend_of
from agentkv.engine.matching import Matcher, limits
from agentkv.errors import InvalidRequest, Unsupported
from agentkv.schemas.constraints import Constraint
from agentkv.schemas.json_schema import Schema, children, mapped

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["Grammars"]

_KEPT = 64
"""Compiled grammars. The least recently used go first."""
_TRIALS = 200
"""Compilations at most to find the place in a schema that is at fault."""


class Grammars:
    """Compiles constraints and starts matchers. May be used from any thread.

    The first constraint makes the tokenizer's tables, and llguidance holds Python up meanwhile: 0.4 s for 50,000
    tokens, several seconds for 250,000. :meth:`warm` does it when nobody waits.
    """

    def __init__(self, tokenizer: Any | None, vocab_size: int, end_ids: Collection[int]) -> None:
        """``vocab_size``: columns of the model's logits."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = sorted(end_ids)
        # One thread: a mask takes a fraction of a millisecond, a step of the model many. It starts with the first.
        self._workers = ThreadPoolExecutor(1, "agentkv-grammar")
        self._lock = threading.Lock()
        self._made_lock = threading.Lock()
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()

    async def matcher(self, constraint: Constraint, said: Sequence[int] = ()) -> Matcher:
        """Whoever allows the tokens of one output that follows ``constraint``, the first mask on its way.

        ``said``: tokens that the output has already. Raises ``InvalidRequest`` for a constraint that cannot be
        compiled, that nothing satisfies, or that ``said`` breaks.
        """
        return await asyncio.to_thread(self.start, constraint, said)

    def start(self, constraint: Constraint, said: Sequence[int] = ()) -> Matcher:
        """:meth:`matcher`, blocking."""
        matcher = Matcher(self._grammar(constraint).deep_copy(), self._vocab_size, self._workers, constraint.param)
        matcher.follow(said)
        return matcher

    def warm(self) -> None:
        """Make the tokenizer's tables now. Blocking; raises ``Unsupported`` for a tokenizer that has none."""
        self._made()

    def text(self, tokens: Sequence[int]) -> str:
        """What an output's tokens say, the end token aside."""
        ends = frozenset(self._end_ids)
        return self._made().decode_bytes([token for token in tokens if token not in ends]).decode(errors="replace")

    def _made(self) -> LLTokenizer:
        with self._made_lock:
            return self._tables

    @cached_property
    def _tables(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if self._tokenizer is None:
            raise InvalidRequest("this model has no tokenizer, so that no output can follow a schema", param="schema")
        backend = copy(backend_of(self._tokenizer))
        backend.no_padding()
        backend.no_truncation()
        # Logits may have more columns than there are tokens, or, in odd checkpoints, fewer: what the tables have too
        # many of is cut off in the mask.
        width = max(self._vocab_size, backend.get_vocab_size(with_added_tokens=True))
        try:
            return LLTokenizer(backend.to_str(), n_vocab=width, eos_token=self._end_ids or None)
        except ValueError as error:
            name = type(self._tokenizer).__name__
            raise Unsupported(f"a schema with the tokenizer {name}", str(error), param="schema") from error

    def _grammar(self, constraint: Constraint) -> LLMatcher:
        """The compiled grammar at its start; compiled once, by whoever comes first. Copies share what they learn."""
        digest = constraint.digest
        with self._lock:
            found = self._compiled.get(digest)
            mine = found is None
            if found is None:
                found = self._compiled[digest] = Future()
            self._compiled.move_to_end(digest)
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        if mine:
            try:
                found.set_result(self._compile(constraint))
            except BaseException as error:
                with self._lock:
                    self._compiled.pop(digest, None)
                found.set_exception(error)
        return found.result()

    def _compile(self, constraint: Constraint) -> LLMatcher:
        from llguidance import LLMatcher

        tables = self._made()
        if constraint.kind == "json":
            document = json.loads(constraint.text)
            matcher, fault = self._try(document, constraint)
            if matcher is not None:
                return matcher
            place = self._place(document, constraint)
            _, there = self._try(_within(document, place), constraint)
            raise InvalidRequest(f"schema: {place}: {there or fault}", param="schema")
        make = LLMatcher.grammar_from_regex if constraint.kind == "regex" else LLMatcher.grammar_from_lark
        matcher = LLMatcher(tables, make(constraint.text), log_level=0, limits=limits())
        if fault := _fault(matcher, self._vocab_size):
            raise InvalidRequest(f"the constraint cannot be used: {fault}", param="constraint")
        return matcher

    def _try(self, document: Schema, constraint: Constraint) -> tuple[LLMatcher | None, str]:
        """The compiled schema, or what is wrong with it."""
        from llguidance import LLMatcher

        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(document), overrides=constraint.form)  # type: ignore[arg-type]
        except ValueError as error:
            return None, str(error)
        matcher = LLMatcher(self._made(), grammar, log_level=0, limits=limits())
        fault = _fault(matcher, self._vocab_size)
        return (None, fault) if fault else (matcher, "")

    def _place(self, document: Schema, constraint: Constraint) -> str:
        """Where the fault is: the innermost schema that cannot be compiled by itself either."""
        place, node, trials = "#", document, 0
        while True:
            for step, child in children(node):
                if child is False:
                    continue
                trials += 1
                if trials > _TRIALS:
                    return place
                if self._try(_within(document, place + step), constraint)[0] is None:
                    place, node = place + step, child
                    break
            else:
                return place


def _fault(matcher: LLMatcher, width: int) -> str:
    """What is wrong with a compiled grammar, from llguidance's first lines; empty for one that can begin."""
    if matcher.is_error():
        return _first_lines(matcher.get_error())
    start = matcher.deep_copy()
    start.compute_bitmask()
    if start.is_error():
        return "no output follows it"
    return ""


def _first_lines(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and "non-verbose" not in line]
    return " ".join(lines)[:300]


def _within(document: Schema, place: str) -> Schema:
    """The schema at ``place`` as a document of its own, in which its references still lead somewhere."""
    if place == "#":
        return document
    home = "#/$defs/whole"

    def moved(node: Schema, _step: str = "") -> Schema:
        if isinstance(node, bool):
            return node
        out = mapped(node, moved)
        if "$ref" in out:
            out["$ref"] = home + out["$ref"][1:]
        return out

    return {"$defs": {"whole": moved(document)}, "$ref": home + place[1:]}
