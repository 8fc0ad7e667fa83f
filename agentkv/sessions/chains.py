"""Chains: a conversation up to some message as one digest, so that it is found again by what was said in it.

::

    root ─▶ digest of message 1 ─▶ of 1 and 2 ─▶ …       each is a key under which an item is stored

Two conversations have the same chain where they have the same root (tenant, model, system prompt, tools, template
arguments, policy, codec) and the same messages, as ``identities`` sees them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from blake3 import blake3

from agentkv.schemas.messages import Identities, Message
from agentkv.sessions.db.records import ItemRecord, SessionRecord
from agentkv.sessions.heads import in_head

__all__ = ["Chain", "chained", "digests", "root", "root_of"]

_DIGEST_BYTES = 16


def root(
    *,
    tenant: str,
    kv_fingerprint: str,
    session_fingerprint: str,
    policy: str,
    idle_codec: str,
    system: str | None,
    tools: Sequence[Any] | None,
    template_args: Mapping[str, Any],
) -> str:
    """Digest of all that a conversation depends on before the first message; the arguments are a record's fields."""
    policy = policy.partition(":now=")[0]  # an adaptive session is one policy, whatever it is under now
    said = None if system is None else system.strip()
    model = [kv_fingerprint, session_fingerprint]
    return _digest([tenant, *model, policy, idle_codec, said, list(tools or ()), dict(template_args)])


def root_of(record: SessionRecord) -> str:
    """The root of a session's chains, as its record is now."""
    return root(
        tenant=record.tenant,
        kv_fingerprint=record.kv_fingerprint,
        session_fingerprint=record.session_fingerprint,
        policy=record.policy,
        idle_codec=record.idle_codec,
        system=record.system,
        tools=record.tools,
        template_args=record.template_args,
    )


class Chain:
    """The chain of a conversation so far. ``digest``: ``None`` once raw tokens are among it: they are no messages."""

    def __init__(self, digest: str | None) -> None:
        """At the root."""
        self.digest = digest
        self._identities = Identities()

    def copy(self) -> Chain:
        """One that goes on by itself from here."""
        other = Chain(self.digest)
        other._identities = self._identities.copy()
        return other

    def then(self, message: Message | None) -> str | None:
        """Go on to behind ``message``, ``None`` for raw tokens; the digest there."""
        if message is None or self.digest is None:
            self.digest = None
        else:
            self.digest = _digest([self.digest, self._identities.of(message)])
        return self.digest

    def then_item(self, item: ItemRecord, record: SessionRecord) -> str | None:
        """Go on to behind an item of the session ``record``. Its head is in the root."""
        if in_head(record, item):
            return None
        return self.then(None if item.kind == "tokens" else Message.from_canonical(item.content))


def chained(record: SessionRecord, items: Iterable[ItemRecord]) -> list[ItemRecord]:
    """All items of a session, each with its chain."""
    chain = Chain(root_of(record))
    return [replace(item, chain=chain.then_item(item, record)) for item in items]


def digests(start: str, messages: Iterable[Message]) -> list[str]:
    """The chain behind each of ``messages``, from the root ``start`` on."""
    chain = Chain(start)
    return [digest for message in messages if (digest := chain.then(message)) is not None]


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return blake3(text.encode()).hexdigest(length=_DIGEST_BYTES)
