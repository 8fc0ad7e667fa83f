"""Every blob store holds to one contract: folder, memory, S3 server, and each of them encrypted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from s3 import S3, s3_server

from agentkv.storage.blobs import BlobStore
from agentkv.storage.encrypted import EncryptedBlobs
from agentkv.storage.local import LocalBlobs
from agentkv.storage.memory import MemoryBlobs
from agentkv.storage.remote import RemoteBlobs
from agentkv.storage.sealing import sealed_nbytes
from agentkv.testing.blobs import BLOB_CHECKS, Subject

KEY = bytes(range(32))


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_server() as server:
        yield server


@pytest.fixture(
    params=["local", "memory", "s3", "obstore-memory", "encrypted-local", "encrypted-memory", "encrypted-s3"]
)
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Subject:
    numbers = count()

    def local(budget: int) -> BlobStore:
        return LocalBlobs(tmp_path / str(next(numbers)), budget_bytes=budget)

    def local_again(store: BlobStore) -> BlobStore:
        assert isinstance(store, LocalBlobs)
        return LocalBlobs(store.root)

    def remote(budget: int) -> BlobStore:
        server: S3 = request.getfixturevalue("s3")
        return RemoteBlobs(server.url(), budget_bytes=budget, config=server.config())

    def remote_again(store: BlobStore) -> BlobStore:
        assert isinstance(store, RemoteBlobs)
        return RemoteBlobs(store.url, config=request.getfixturevalue("s3").config())

    plain: dict[str, tuple[Callable[[int], BlobStore], Callable[[BlobStore], BlobStore] | None]] = {
        "local": (local, local_again),
        "memory": (MemoryBlobs, None),
        "s3": (remote, remote_again),
        "obstore-memory": (lambda budget: RemoteBlobs("memory:///", budget_bytes=budget), None),
    }
    kind = request.param.removeprefix("encrypted-")
    make, again = plain[kind]
    if kind == request.param:
        return Subject(make, reopen=again)

    def encrypted_again(store: BlobStore) -> BlobStore:
        assert isinstance(store, EncryptedBlobs) and again is not None
        return EncryptedBlobs(again(store.inner), KEY)

    return Subject(
        lambda budget: EncryptedBlobs(make(budget), KEY), sealed_nbytes, encrypted_again if again is not None else None
    )


@pytest.mark.parametrize("check", BLOB_CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Callable[[Subject], None], subject: Subject) -> None:
    check(subject)
