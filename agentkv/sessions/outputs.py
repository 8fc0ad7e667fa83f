"""Outputs that follow a schema or a grammar: what allows their tokens, and what they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentkv.engine.grammars import Grammars
from agentkv.engine.job import JobResult
from agentkv.engine.matching import Matcher
from agentkv.schemas.constraints import Constraint
from agentkv.sessions.core import SessionCore
from agentkv.sessions.db.repository import Repository

__all__ = ["Output", "said_before"]


@dataclass(frozen=True, slots=True)
class Output:
    """One reply's. ``said``: tokens of the cut reply that it goes on with. ``parse``: whether it becomes an object."""

    constraint: Constraint
    matcher: Matcher
    grammars: Grammars
    said: tuple[int, ...]
    parse: bool

    @classmethod
    async def begin(cls, constraint: Constraint, grammars: Grammars, said: Sequence[int], *, parse: bool) -> Output:
        """Compile, or find compiled. Raises as ``Grammars.matcher`` does."""
        return cls(constraint, await grammars.matcher(constraint, said), grammars, tuple(said), parse)

    def read(self, result: JobResult) -> tuple[Any, str | None]:
        """What the reply says, as an object; ``None`` and the reason where it says nothing whole."""
        if not self.parse:
            return None, None
        if result.finish_reason == "length":
            return None, (
                f"cut after {len(result.tokens)} tokens, before it was complete: raise max_tokens, or go on with "
                f"session.continue_ and the same {self.constraint.param}"
            )
        if not self.matcher.finished:
            return None, "a stop string ended it before it was complete"
        try:
            return self.constraint.parse(self.grammars.text([*self.said, *result.tokens])), None
        except ValueError as error:
            return None, str(error)


async def said_before(core: SessionCore, repository: Repository) -> list[int]:
    """The tokens of the reply that ``max_tokens`` cut, to whose end the session's ledger goes; none for a whole one."""
    said: list[int] = []
    if core.last_finish != "length" or core.ledger is None:
        return said
    for turn in reversed((await repository.turns(core.id))[: core.record.turns]):
        if turn.finish_reason != "length":
            break
        start = turn.span.stop - turn.completion_tokens
        said = [*core.ledger[start : turn.span.stop], *said]
        if start > turn.span.start:  # it had input of its own: the reply began there
            break
    return said
