"""Every error agentkv raises.

AgentKVError
├── InvalidRequest              an argument that cannot be served (also a ValueError); names the parameter
│   ├── ContextTooLong          more tokens than model and policy allow
│   ├── ImportRefused           a file that is no export of a session, or not whole, or altered
│   ├── TemplateError           the chat template refused these messages
│   └── Unsupported             a model or feature that is refused by name
├── NotFound                    (also a LookupError)
│   ├── KeyNotFound
│   ├── ResponseNotFound
│   ├── SessionNotFound
│   └── ModelNotFound
├── SessionBusy                 another turn is running on this session
├── CapacityExceeded            no memory for this turn, even after demoting idle sessions
├── LimitExceeded               a key may not have, or do, that much
├── HomeLocked                  another process owns this home folder
├── ModelUnavailable            no source could deliver the model
├── StorageError
│   ├── StorageFull             disk full, read-only, or budget reached
│   │   └── QuotaReached        what one key may have on disk
│   ├── WrongKey                the blob store and the encryption key do not belong together
│   └── ChunkFault              one stored chunk cannot be used (missing, altered, foreign …)
├── DatabaseUnavailable         the database stayed locked or unreachable after bounded retries
├── EngineFailed                the model thread raised; the turn was rolled back
└── Closed                      the runtime, or this session, is closed

A message says what happened, with which numbers, and what to do.
"""

from __future__ import annotations

__all__ = [
    "AgentKVError",
    "CapacityExceeded",
    "ChunkFault",
    "Closed",
    "ContextTooLong",
    "DatabaseUnavailable",
    "EngineFailed",
    "HomeLocked",
    "ImportRefused",
    "InvalidRequest",
    "KeyNotFound",
    "LimitExceeded",
    "ModelNotFound",
    "ModelUnavailable",
    "NotFound",
    "QuotaReached",
    "ResponseNotFound",
    "SessionBusy",
    "SessionDeleted",
    "SessionNotFound",
    "StorageError",
    "StorageFull",
    "TemplateError",
    "Unsupported",
    "WrongKey",
]


class AgentKVError(Exception):
    """Base of every error this package raises on purpose."""


class InvalidRequest(AgentKVError, ValueError):
    """An argument that cannot be served. ``param`` names it."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(InvalidRequest):
    """A turn needs ``tokens`` positions where model and policy allow ``limit``."""

    def __init__(self, *, tokens: int, limit: int, advice: str) -> None:
        super().__init__(
            f"this turn needs {tokens:,} tokens of context, the limit is {limit:,}: {advice}", param="messages"
        )
        self.tokens = tokens
        self.limit = limit
        self.advice = advice


class ImportRefused(InvalidRequest):
    """The file at ``path`` is not taken in; nothing of it is kept.

    ``reason`` is one of ``unreadable``, ``format`` (no such file, or one that contradicts itself), ``version``,
    ``truncated``, ``checksum``.
    """

    def __init__(self, path: str, reason: str, detail: str) -> None:
        advice = {
            "truncated": "; copy or export it again",
            "checksum": "; copy or export it again",
            "version": "; use the version of agentkv that wrote it, or a newer one",
        }
        super().__init__(f"{path} is not imported: {reason}: {detail}{advice.get(reason, '')}", param="path")
        self.path = path
        self.reason = reason
        self.detail = detail


class TemplateError(InvalidRequest):
    """The model's chat template refused the messages; the message carries its own words."""


class Unsupported(InvalidRequest):
    """A model, layer type or parameter that is refused by name. ``feature`` is that name."""

    def __init__(self, feature: str, message: str, *, param: str | None = None) -> None:
        super().__init__(f"{feature} is not supported: {message}", param=param)
        self.feature = feature


class NotFound(AgentKVError, LookupError):
    """A name that nothing answers to."""


class SessionNotFound(NotFound):
    """No such session for this tenant."""

    def __init__(self, session_id: str) -> None:
        super().__init__(
            f"there is no session {session_id!r}; `agentkv sessions list`, or GET /v1/sessions, shows those there are"
        )
        self.session_id = session_id


class ResponseNotFound(NotFound):
    """No response of this tenant has that id: it was deleted, its session was, or it was not to be stored.

    ``param``: the field that named it.
    """

    def __init__(self, response_id: str, *, param: str | None = None) -> None:
        super().__init__(
            f"there is no response {response_id!r}: it was deleted, its session was, or it was made with store: false"
        )
        self.response_id = response_id
        self.param = param


class KeyNotFound(NotFound):
    """No key has that id or name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no key {name!r}; `agentkv keys list` shows those that exist")
        self.name = name


class ModelNotFound(NotFound):
    """Neither a catalogue name, nor a local folder, nor a Hugging Face id."""


class SessionBusy(AgentKVError):
    """Another turn is running on the session. Retry after ``retry_after`` seconds, or pass ``wait=True``."""

    def __init__(self, session_id: str, *, retry_after: float = 1.0) -> None:
        super().__init__(
            f"session {session_id} is busy with another turn; retry in {retry_after:.0f} s (in Python, wait=True waits)"
        )
        self.session_id = session_id
        self.retry_after = retry_after


class CapacityExceeded(AgentKVError):
    """A turn needs ``needed`` bytes where ``available`` of ``budget`` bytes can be freed."""

    def __init__(
        self, message: str, *, needed: int, available: int, budget: int, retry_after: float | None = 1.0
    ) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available
        self.budget = budget
        self.retry_after = retry_after


class LimitExceeded(AgentKVError):
    """What a key allows is used up: ``used`` of ``limit``. Retry after ``retry_after`` seconds, where time helps."""

    def __init__(self, message: str, *, limit: int, used: int, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.limit = limit
        self.used = used
        self.retry_after = retry_after


class HomeLocked(AgentKVError):
    """Another process owns the home folder. ``pid`` and ``host`` say which, when it wrote them."""

    def __init__(self, home: str, *, pid: int | None, host: str | None) -> None:
        owner = f"process {pid} on {host}" if pid is not None else "another process"
        super().__init__(f"the home {home} is in use by {owner}; stop it, or open another home")
        self.home = home
        self.pid = pid
        self.host = host


class ModelUnavailable(AgentKVError):
    """No source could deliver the model. ``reasons`` maps each source that was tried to why it failed."""

    def __init__(self, name: str, reasons: dict[str, str]) -> None:
        tried = "; ".join(f"{source}: {why}" for source, why in reasons.items())
        super().__init__(f"model {name!r} could not be fetched ({tried}). A local folder works too: --model PATH")
        self.name = name
        self.reasons = reasons


class StorageError(AgentKVError):
    """The blob store could not do what was asked."""


class StorageFull(StorageError):
    """Disk full, read-only, or a byte budget reached. Sessions stay usable; nothing is half-written."""


class QuotaReached(StorageFull):
    """A key's sessions have ``used`` of ``limit`` bytes on disk, and ``needed`` more do not fit. The disk is well."""

    def __init__(self, name: str, *, limit: int, used: int, needed: int) -> None:
        super().__init__(
            f"key {name!r} may have {limit:,} bytes of stored KV (max_disk), has {used:,} and needs {needed:,} more: "
            f"delete sessions of it"
        )
        self.limit = limit
        self.used = used
        self.needed = needed


class WrongKey(StorageError):
    """A blob store was opened with another key than it was made with, with a key where it has none, or without one."""


class ChunkFault(StorageError):
    """One stored chunk cannot be used; its tokens are recomputed from the ledger.

    ``reason`` is one of ``missing``, ``unreadable``, ``unreachable``, ``truncated``, ``checksum``, ``format``,
    ``fingerprint``, ``tokens``, ``geometry``, ``version`` (a format or codec unknown here), ``fit`` (calibration
    data is missing), ``decode``.
    """

    def __init__(self, chunk_id: str, reason: str, detail: str) -> None:
        super().__init__(f"chunk {chunk_id}: {reason}: {detail}")
        self.chunk_id = chunk_id
        self.reason = reason
        self.detail = detail


class DatabaseUnavailable(AgentKVError):
    """The database stayed locked or unreachable after bounded retries; no turn was half-committed."""


class EngineFailed(AgentKVError):
    """The model thread raised. The turn was rolled back; the cause is chained."""


class Closed(AgentKVError):
    """The runtime, or this session, is closed."""


class SessionDeleted(Closed, NotFound):
    """The session that this object stands for was deleted."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"session {session_id} was deleted")
        self.session_id = session_id
