"""Contact with a remote object store through ``obstore``: bounded time, errors in plain words, nothing secret in them.

An error of the underlying library quotes request lines and answers, which may hold signatures and tokens: none of its
text goes further than this module, neither as a message nor as an exception's context.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urlsplit

from agentkv.errors import InvalidRequest, Unsupported
from agentkv.storage.blobs import Parts

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["Endpoint", "Trouble"]

T = TypeVar("T")

_CONNECT_SECONDS = 3.0
_RETRIES = 3
_RETRY_SECONDS = 10.0
_TRANSFER_SECONDS = 60.0
_PAUSE_SECONDS = 5.0
_ALLOW_HTTP = ("AWS_ALLOW_HTTP", "AZURE_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP")
_NO_CREDENTIALS = ("169.254.169.254", "metadata.google", "MissingAccount", "MissingCredential", "InvalidGrant")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")

_Kind = Literal["absent", "refused", "full", "silent", "other"]


class Trouble(Exception):
    """What the store said, in words for a person. ``silent``: no answer, or only that it cannot answer now."""

    def __init__(self, kind: _Kind, words: str) -> None:
        super().__init__(words)
        self.kind = kind
        self.words = words


class Endpoint:
    """Objects under one URL. Thread-safe; every method blocks, releases the GIL, and may raise ``Trouble``.

    ``timeout_seconds`` bounds the store's silence, ``put_timeout_seconds`` one upload; a request that fails for the
    network or a 5xx is repeated at most three times within ten seconds. After that the store is not asked for five
    seconds and every call fails at once: many readers of a dead store would else wait one after the other.
    """

    def __init__(
        self, url: str, *, config: Mapping[str, Any] | None, timeout_seconds: float, put_timeout_seconds: float
    ) -> None:
        self.name = _shown(url)
        self._silence: tuple[float, str] | None = None
        try:
            import obstore.store
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith("obstore"):
                raise
            raise Unsupported(
                "storage at a URL", f"{self.name} needs obstore: pip install 'agentkv[remote]'", param="blobs_url"
            ) from None
        self._writes = self._call(lambda: _open(obstore.store.from_url, url, config, timeout=put_timeout_seconds))
        self._reads = self._writes
        if not isinstance(self._writes, obstore.store.MemoryStore | obstore.store.LocalStore):
            # A limit of silence also runs while a body is sent, so that uploads cannot share it.
            self._reads = self._call(
                lambda: _open(
                    obstore.store.from_url, url, config, timeout=_TRANSFER_SECONDS, read_timeout=timeout_seconds
                )
            )

    def put(self, key: str, parts: Parts) -> None:
        """Store one object, whole and durable on return. One request, whatever the size: nothing is left half-sent."""
        pieces = [part for part in parts if len(part)] or [b""]
        self._call(lambda: self._writes.put(key, pieces, use_multipart=False))

    def get(self, key: str, first: int | None = None) -> memoryview:
        """The object, or its ``first`` bytes (at least one of each)."""
        options: Any = None if first is None else {"range": (0, first)}
        return self._call(lambda: memoryview(self._reads.get(key, options=options).bytes()))

    def there(self, key: str) -> bool:
        """Whether the object exists."""
        try:
            self._call(lambda: self._reads.head(key))
        except Trouble as trouble:
            if trouble.kind != "absent":
                raise
            return False
        return True

    def delete(self, key: str) -> None:
        """Remove the object; most stores do not say whether there was one."""
        self._call(lambda: self._reads.delete(key))

    def copy(self, key: str, to: str) -> None:
        """Copy an object inside the store."""
        self._call(lambda: self._reads.copy(key, to))

    def list(self) -> Iterator[tuple[str, int]]:
        """(key, bytes) of every object under the URL."""
        batches = self._call(lambda: iter(self._reads.list()))
        while (batch := self._call(lambda: next(batches, None))) is not None:
            for meta in batch:
                yield meta["path"], meta["size"]

    def _call(self, work: Callable[[], T]) -> T:
        if self._silence is not None and time.monotonic() < self._silence[0]:
            raise Trouble("silent", self._silence[1])
        try:
            result = work()
        except Exception as error:
            trouble = _trouble(error)
        else:
            self._silence = None
            return result
        if trouble.kind == "silent":
            self._silence = time.monotonic() + _PAUSE_SECONDS, trouble.words
        raise trouble  # not inside `except`: the library's own text would travel along as context


def _open(from_url: Callable[..., ObjectStore], url: str, config: Mapping[str, Any] | None, **limits: float) -> Any:
    scheme = urlsplit(url).scheme
    if scheme == "memory":
        return from_url(url)
    if scheme == "file":
        return from_url(url, mkdir=True)
    # Options given here replace those of the environment, so that its permission for http is read here.
    plain = any(os.environ.get(name, "").lower() in ("1", "true") for name in _ALLOW_HTTP)
    settings = dict(config or {})
    client = {
        "allow_http": bool(settings.pop("allow_http", plain)),
        "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
        **{name: timedelta(seconds=seconds) for name, seconds in limits.items()},
    }
    backoff = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=1), "base": 2}
    retry = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_SECONDS), "backoff": backoff}
    return from_url(url, config=settings or None, client_options=client, retry_config=retry)


def _shown(url: str) -> str:
    """The URL as errors show it; ``InvalidRequest`` for one that is none of an object store, or carries a secret."""
    known = "s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"
    try:
        parts = urlsplit(url)
    except ValueError:
        raise InvalidRequest(f"the storage URL cannot be read; write {known}", param="blobs_url") from None
    if parts.username or parts.password or parts.query or parts.fragment:
        raise InvalidRequest(
            "a storage URL carries no user, password or query: give credentials in the environment "
            "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or your provider's names)",
            param="blobs_url",
        )
    if parts.scheme not in ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "memory", "file"):
        raise InvalidRequest(f"{url!r} is no storage URL; write {known}", param="blobs_url")
    return url.rstrip("/") or url


def _trouble(error: Exception) -> Trouble:
    """What an error of the library means. Its text is searched for marks, never quoted."""
    text = str(error)
    status = int(found[1]) if (found := re.search(r"status code: (\d{3})", text)) else 0
    code = f" {found[1]}" if (found := re.search(r"<Code>([A-Za-z]{1,48})</Code>", text)) else ""
    tries = f" after {found[1]} retries" if (found := re.search(r"after (\d+) retries", text)) else ""
    if any(mark in text for mark in _NO_CREDENTIALS):
        return Trouble(
            "refused", "no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or your provider's)"
        )
    if any(mark in text for mark in _NO_BUCKET):
        return Trouble("other", "there is no bucket or container of this name; create it, or correct the URL")
    if isinstance(error, FileNotFoundError):
        return Trouble("absent", "no such object")
    denied = "AccessDenied" in text or type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError")
    if denied or status in (401, 403):
        return Trouble("refused", f"access is refused ({status or 403}{code}); check the credentials and their rights")
    if status == 507:
        return Trouble("full", f"the store is full ({status}{code})")
    if status >= 500 or status == 429:
        return Trouble("silent", f"the store answers {status}{code}{tries}; try again once it is well")
    if status:
        return Trouble("other", f"the store answers {status}{code} to the request")
    if "BadScheme" in text:
        return Trouble("other", "the endpoint is plain http, which is off; set AWS_ALLOW_HTTP=true to allow it")
    if "dns error" in text:
        return Trouble("silent", f"the endpoint's host name does not resolve{tries}; check it and the network")
    if "InvalidCertificate" in text or "certificate" in text:
        return Trouble("other", "the endpoint's TLS certificate is not trusted")
    if "kind: Timeout" in text or "TimedOut" in text:
        return Trouble("silent", f"the endpoint does not answer in time{tries}; check it and the network")
    if "HttpError" in text or "reqwest" in text:
        return Trouble("silent", f"the endpoint cannot be reached{tries}; check it and the network")
    return Trouble("other", f"the request failed ({type(error).__name__})")
