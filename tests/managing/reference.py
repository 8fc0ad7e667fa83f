"""What must be in the ledger: each session as somebody outside knows it, turn by turn, rendered without the runtime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from retaining import held_after
from soaking.oracle import Violation

from agentkv.schemas.replies import Item, Reply
from agentkv.sessions.db.records import ItemRecord, TurnRecord
from agentkv.sessions.session import Session
from managing.rows import Rows, SessionRow

__all__ = ["Asked", "Fate", "Given", "Known", "Plan", "Tongue"]

Fate = Literal["told", "refused", "unknown", "surely", "never"]


@dataclass(frozen=True)
class Plan:
    """How a session is made. ``system`` makes it one of messages, ``None`` one of raw token ids or messages."""

    chat: bool
    system: str | None
    policy: str
    codec: str

    @property
    def compared(self) -> bool:
        """Whether every token can be foretold: not behind a codec that loses something."""
        return self.codec in ("exact", "raw")


@dataclass(frozen=True)
class Given:
    """What a turn adds before it generates; ``generates``: whether it does."""

    kind: Literal["send", "append", "continue"]
    text: str | None = None
    ids: tuple[int, ...] | None = None
    generates: bool = True


class Tongue:
    """ChatML, written down once more: from messages to ids, beside the runtime's own rendering."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._terminator = self.ids("<|im_end|>\n")

    def ids(self, text: str) -> list[int]:
        """Tokens of a text, control tokens as such."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def head(self, system: str | None) -> list[int]:
        """The system prompt."""
        return [] if system is None else self.ids(f"<|im_start|>system\n{system}<|im_end|>\n")

    def turn(self, given: Given, ledger: Sequence[int], spoken: bool, cut: bool) -> list[int]:
        """What the ledger grows by before the reply. ``spoken``: it ends with a reply, which ``cut`` says is not over.

        Of the reply's terminator there may be a part already: it ended by itself.
        """
        if given.ids is not None:
            return list(given.ids)
        if given.kind == "continue" and cut:
            return []
        ends = self._terminator if spoken else []
        known = next(n for n in range(len(ends), -1, -1) if list(ledger[len(ledger) - n :]) == ends[:n])
        text = "" if given.text is None else f"<|im_start|>user\n{given.text}<|im_end|>\n"
        return [*ends[known:], *self.ids(text + ("<|im_start|>assistant\n" if given.generates else ""))]


@dataclass(eq=False)
class Asked:
    """One operation and what became of it.

    ``fate``: what its caller may conclude. ``told``: it happened. ``refused``: it did not, an error says why.
    ``unknown``: its caller went away, or the process died before it answered. ``surely`` and ``never``: nobody was
    told, but the process died at a place before which it is, or is not, in the database.
    """

    known: Known
    what: str
    given: Given | None = None
    policy: str | None = None
    reply: Reply | None = None
    items: list[Item] | None = None
    value: Any = None
    error: BaseException | None = None
    fate: Fate = "told"

    def __str__(self) -> str:
        told = self.reply.ids if self.reply is not None else self.items if self.items is not None else self.error
        return f"{self.what} ({self.fate}) of {self.given}: {told!r}"

    @property
    def is_turn(self) -> bool:
        return self.given is not None

    @property
    def is_delete(self) -> bool:
        return self.what == "Delete"


@dataclass(eq=False)
class Known:
    """A session. ``ledger``, ``turns``, ``items``: as they are in SQL, each seen once and the same ever since.

    ``script``: turns and policies in their order. ``held``: what its KV held when ``since`` tokens were computed, at
    the last change of its policy. ``twin``: one to which nothing ever happens, that has heard ``heard`` of the script.
    ``short``: it was cut and has said nothing since; its KV may end before its ledger does.
    ``approximate``: its KV was computed anew without what had been evicted; ``rebuilt``: from these tokens.
    """

    id: str
    plan: Plan
    handle: Session
    policy: str = ""
    pinned: int = 0
    ledger: list[int] = field(default_factory=list)
    turns: list[TurnRecord] = field(default_factory=list)
    items: list[ItemRecord] = field(default_factory=list)
    script: list[TurnRecord | str] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    since: int = 0
    stored: int = 0
    twin: Session | None = None
    heard: int = 0
    approximate: bool = False
    short: bool = False
    rebuilt: list[int] | None = None

    @property
    def spoken(self) -> bool:
        """Whether the ledger ends with a reply."""
        return bool(self.items) and self.items[-1].generated

    @property
    def cut(self) -> bool:
        """Whether that reply was ended by its limit."""
        return bool(self.turns) and self.turns[-1].finish_reason == "length"

    def items_of(self, turn: TurnRecord) -> list[ItemRecord]:
        """The items that a turn added."""
        return [item for item in self.items if item.turn == turn.seq]

    def held_at(self, kv_length: int) -> list[int]:
        """Positions that its KV state holds once so many tokens are computed, worked out token by token."""
        return held_after(self.policy, self.items, self.pinned, kv_length, held=self.held, start=self.since)  # type: ignore[arg-type]

    def check_unchanged(self, rows: Rows) -> None:
        """What was committed is there, in its order, and nothing else is."""
        pairs: tuple[tuple[str, Sequence[Any], Sequence[Any]], ...] = (
            ("ledger", rows.ledger(self.id), self.ledger),
            ("turns", rows.turns(self.id), self.turns),
            ("items", rows.items(self.id), self.items),
        )
        for name, found, known in pairs:
            if found != known:
                at = next((i for i, (a, b) in enumerate(zip(found, known, strict=False)) if a != b), None)
                at = min(len(found), len(known)) if at is None else at
                raise Violation(
                    f"the {name} of {self.id}: {len(found)} in SQL, {len(known)} known; from {at} on "
                    f"{found[at : at + 3]}, known {known[at : at + 3]}"
                )

    def take_in(self, rows: Rows, row: SessionRow, asked: Sequence[Asked], tongue: Tongue) -> list[TurnRecord]:
        """The turns that are new in SQL: each is one that was asked for, whole, with what its caller was told.

        Nothing that was told is missing, nothing that was refused is there.
        """
        left = [one for one in asked if one.is_turn]
        ledger, items = rows.ledger(self.id), rows.items(self.id)
        before = len(self.turns)
        for turn in rows.turns(self.id)[before:]:
            self._take_policies(row, asked)
            mine = [item for item in items if item.turn == turn.seq]
            piece = ledger[turn.span.start : turn.span.stop]
            match = next((one for one in left if _told(one, mine)), None) or next(
                (one for one in left if self._may_be(one, turn, piece, tongue)), None
            )
            if match is None:
                raise Violation(f"{turn} of {self.id} is nothing of what was asked: {[str(one) for one in left]}")
            left.remove(match)
            self._check_turn(match, turn, mine, piece, tongue)
            self.ledger += piece
            self.items += mine
            self.turns.append(turn)
            self.script.append(turn)
            self.short = False
        self._take_policies(row, asked)
        if lost := [one for one in left if one.fate in ("told", "surely")]:
            raise Violation(f"{self.id}: told or committed, and not in the ledger: {[str(one) for one in lost]}")
        if row.policy != self.policy:
            raise Violation(f"the policy of {self.id} is {row.policy!r}, known is {self.policy!r}")
        return self.turns[before:]

    def _take_policies(self, row: SessionRow, asked: Sequence[Asked]) -> None:
        """A new policy, at the place in the script at which it was set."""
        one = next((one for one in asked if one.policy is not None and one.fate != "refused"), None)
        spoken_to = len(self.turns) > bool(self.plan.system) and not self.short
        computed = len(self.ledger) - 1 if spoken_to else row.policy_since
        if one is None or row.policy == self.policy or row.policy_since != computed:
            return
        if one.policy != row.policy:
            raise Violation(f"{self.id} was given {one.policy!r} and has {row.policy!r}")
        self.held, self.since = self.held_at(row.policy_since), row.policy_since
        self.policy = row.policy
        self.script.append(row.policy)

    def _may_be(self, one: Asked, turn: TurnRecord, piece: Sequence[int], tongue: Tongue) -> bool:
        """Whether it is what somebody asked for who was not told."""
        if one.fate not in ("unknown", "surely") or one.given is None or turn.kind != one.given.kind:
            return False
        rendered = tongue.turn(one.given, self.ledger, self.spoken, self.cut)
        return list(piece[: len(piece) - turn.completion_tokens]) == rendered

    def _check_turn(
        self, one: Asked, turn: TurnRecord, items: Sequence[ItemRecord], piece: list[int], tongue: Tongue
    ) -> None:
        assert one.given is not None
        rendered = tongue.turn(one.given, self.ledger, self.spoken, self.cut)
        said = piece[len(rendered) :]
        wrong: dict[str, Any] = {
            "seq": (turn.seq, len(self.turns)),
            "start": (turn.span.start, len(self.ledger)),
            "kind": (turn.kind, one.given.kind),
            "input": (piece[: len(rendered)], rendered),
            "completion tokens": (turn.completion_tokens, len(said)),
            "items": ([item.seq for item in items], [len(self.items) + i for i in range(len(items))]),
            "spans": (list(_tiling(items, turn)), [item.span for item in items]),
            "texts": ([_text(i) for i in items if not i.generated], list(_texts(one.given))),
            "generated": (sum(item.generated for item in items), int(one.given.generates)),
        }
        if one.reply is not None:
            usage = one.reply.usage
            wrong["reply"] = (said, list(one.reply.ids))
            wrong["usage"] = (
                (turn.prompt_tokens, turn.completion_tokens, turn.cached_tokens),
                (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
            )
        if wrong := {name: pair for name, pair in wrong.items() if pair[0] != pair[1]}:
            raise Violation(f"turn {turn.seq} of {self.id} has, and should have: {wrong}")


def _told(one: Asked, items: Sequence[ItemRecord]) -> bool:
    """Whether these are the items that its caller was told of."""
    ids = {item.id for item in items}
    if one.reply is not None:
        return one.reply.item_id in ids
    return one.items is not None and {item.id for item in one.items} == ids


def _tiling(items: Sequence[ItemRecord], turn: TurnRecord) -> Iterator[Any]:
    """Their spans, made to fill the turn's without gap or overlap."""
    at = turn.span.start
    for i, item in enumerate(items):
        stop = turn.span.stop if i + 1 == len(items) else item.span.stop
        yield type(turn.span)(at, stop)
        at = stop


def _text(item: ItemRecord) -> str:
    return str(item.content["content"])


def _texts(given: Given) -> Iterator[str]:
    if given.text is not None:
        yield given.text
    elif given.ids:
        yield ""
