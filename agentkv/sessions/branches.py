"""Several answers to one question, and a question put otherwise: what forks are for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentkv.errors import InvalidRequest
from agentkv.schemas.messages import MessageInput
from agentkv.schemas.replies import Item, Reply

if TYPE_CHECKING:
    from agentkv.sessions.session import Session

__all__ = ["Branch", "edited", "sampled"]

_MOST_BRANCHES = 64


@dataclass(frozen=True, slots=True)
class Branch:
    """A session of its own, and the answer that sets it apart. ``reply``: ``None`` where nothing was to be answered."""

    session: Session
    reply: Reply | None


async def sampled(session: Session, messages: MessageInput | None, n: int, sampling: Mapping[str, Any]) -> list[Branch]:
    """See ``Session.sample``. The messages are computed once, and all branches decode side by side."""
    if not 1 <= n <= _MOST_BRANCHES:
        raise InvalidRequest(f"n must be from 1 to {_MOST_BRANCHES}, got {n}", param="n")
    seed = sampling.get("seed")
    forks: list[Session] = []
    try:
        forks.append(await session.fork())
        if messages is not None:
            await forks[0].append(messages)
        forks.extend([await forks[0].fork() for _ in range(n - 1)])
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(fork.continue_(**{**sampling, **({} if seed is None else {"seed": seed + i})}))
                for i, fork in enumerate(forks)
            ]
    except BaseException as error:
        await asyncio.shield(_deleted(forks))
        if isinstance(error, BaseExceptionGroup):
            raise error.exceptions[0] from None
        raise
    return [Branch(fork, task.result()) for fork, task in zip(forks, tasks, strict=True)]


async def edited(
    session: Session, item_id: str, content: str | Mapping[str, Any], replay: bool, sampling: Mapping[str, Any]
) -> Branch:
    """See ``Session.edit``."""
    items = await session.items()
    index = next((i for i, item in enumerate(items) if item.id == item_id), None)
    if index is None:
        raise InvalidRequest(f"session {session.id} has no item {item_id!r}", param="item")
    item, later = items[index], _inputs(items[index + 1 :])
    if item.role == "system":
        raise InvalidRequest("the system prompt belongs to the session: create one with another", param="item")
    if item.kind == "tokens":
        raise InvalidRequest(f"item {item_id} is raw tokens: fork before it and append others", param="item")
    message = {**item.content, "content": content} if isinstance(content, str) else dict(content)
    rest = later.pop(item.turn, [])
    turns = items[-1].turn + 1 - item.turn
    fork = await (session.fork(items[index - 1].id) if index else session.fork(turns=turns))
    try:
        reply = None
        if item.generated:
            await fork.append(message)
        else:
            reply = await fork.send([message, *rest], **sampling)
        for inputs in later.values() if replay else ():
            reply = await fork.send(inputs, **sampling)
    except BaseException:
        await asyncio.shield(_deleted([fork]))
        raise
    return Branch(fork, reply)


def _inputs(items: Sequence[Item]) -> dict[int, list[Mapping[str, Any]]]:
    """What was said to the session, by turn."""
    found: dict[int, list[Mapping[str, Any]]] = {}
    for item in items:
        if not item.generated:
            found.setdefault(item.turn, []).append(item.content)
    return found


async def _deleted(forks: Sequence[Session]) -> None:
    for fork in forks:
        await fork.delete()
