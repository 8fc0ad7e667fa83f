"""Needle recall: facts planted in a long chat, asked for after a restore.

KL averages over many easy tokens; a digit of a fact that comes back wrong hardly moves it. So greedy answers are
compared too, with those after an exact restore of the same state beside them: small models miss facts on their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from agentkv.engine.adapter import ModelAdapter
from agentkv.engine.direct import prefill, step
from agentkv.engine.templates import ChatTemplate
from agentkv.kv.contract import Layout, SequenceKV
from agentkv.schemas.messages import Message

__all__ = ["NEEDLES", "Needle", "NeedleChat", "answers", "needle_chat", "recalled"]


@dataclass(frozen=True, slots=True)
class Needle:
    """``answer`` is a word or number of ``fact`` that cannot be guessed from ``question``."""

    fact: str
    question: str
    answer: str


NEEDLES = (
    Needle("The access code of the north gate is 7316.", "What is the access code of the north gate?", "7316"),
    Needle("The cat of the lighthouse keeper is called Brindle.", "What is the keeper's cat called?", "Brindle"),
    Needle("Invoice 88 was paid by the Orlando bakery.", "Who paid invoice 88?", "Orlando"),
    Needle("The spare key hangs behind the blue clock.", "What does the spare key hang behind?", "blue clock"),
    Needle("The backup server listens on port 5921.", "On which port does the backup server listen?", "5921"),
    Needle("Doctor Amara was born in Lisbon.", "In which city was Doctor Amara born?", "Lisbon"),
    Needle("The night train to the coast leaves at 23:47.", "When does the night train to the coast leave?", "23:47"),
    Needle("The secret ingredient of the soup is tarragon.", "What is the secret ingredient of the soup?", "tarragon"),
)

_ANSWER_TOKENS = 16
_TAIL = 512
_CLOCK = datetime(2025, 1, 1, 12, tzinfo=UTC)
_DEEPEST = 0.8
"""Facts lie in this first share of the document: what follows them is the lossless tail."""


@dataclass(frozen=True, slots=True)
class NeedleChat:
    """``ids``: a chat whose user message holds the facts; ``questions``: each turn that may follow it."""

    ids: list[int]
    questions: list[list[int]]


def needle_chat(tokenizer: Any, filler: str, tokens: int) -> NeedleChat | None:
    """A chat of about ``tokens`` tokens of ``filler`` paragraphs with the facts between them.

    ``None`` where the tokenizer has no chat template.
    """
    if tokenizer is None:
        return None
    template = ChatTemplate(tokenizer, now=_CLOCK)
    if not template.available:
        return None
    paragraphs: list[str] = []
    used = 0
    for paragraph in filler.split("\n\n"):
        used += len(tokenizer.encode(paragraph, add_special_tokens=False)) + 1
        if used > tokens and paragraphs:
            break
        paragraphs.append(paragraph)
    # From the back, so that earlier places stay where they are.
    for index in range(len(NEEDLES) - 1, -1, -1):
        at = int(len(paragraphs) * _DEEPEST * (index + 0.5) / len(NEEDLES))
        paragraphs.insert(at, NEEDLES[index].fact)
    document = "\n\n".join(paragraphs)
    said = [
        Message(role="user", content=f"Read this carefully. I will ask about it.\n\n{document}"),
        Message(role="assistant", content="I have read it. What would you like to know?"),
    ]
    ids = template.head().ids
    ids += template.turn(said, ids, first=True, after_generated=False, generation_prompt=False).ids
    questions = [
        template.turn(
            [Message(role="user", content=f"{needle.question} Answer with a few words.")],
            ids[-_TAIL:],
            first=False,
            after_generated=False,
            generation_prompt=True,
        ).ids
        for needle in NEEDLES
    ]
    return NeedleChat(ids, questions)


def answers(
    adapter: ModelAdapter, layout: Layout[Any], kv: SequenceKV, chat: NeedleChat, piece: int
) -> list[tuple[int, ...]]:
    """Greedy ids that follow each question. ``kv`` holds the chat, and still does afterwards.

    All questions are answered in the same steps, of which none ends early: the same bits whatever was answered.
    """
    forks = [kv.fork() for _ in chat.questions]
    try:
        for fork, question in zip(forks, chat.questions, strict=True):
            prefill(adapter, layout, fork, question[:-1], piece)
        last: Sequence[int] = [question[-1] for question in chat.questions]
        found: list[list[int]] = [[] for _ in forks]
        for _ in range(_ANSWER_TOKENS):
            logits = step(adapter, layout, [(fork, [token]) for fork, token in zip(forks, last, strict=True)])
            last = logits.argmax(-1).tolist()
            for ids, token in zip(found, last, strict=True):
                ids.append(token)
        return [tuple(ids) for ids in found]
    finally:
        for fork in forks:
            fork.close()


def recalled(tokenizer: Any, found: Sequence[Sequence[int]], end_ids: frozenset[int]) -> float:
    """The share of ``NEEDLES`` that the answers name."""
    hits = 0
    for needle, ids in zip(NEEDLES, found, strict=True):
        until = next((i for i, token in enumerate(ids) if token in end_ids), len(ids))
        hits += needle.answer.lower() in tokenizer.decode(list(ids[:until])).lower()
    return hits / len(NEEDLES)
