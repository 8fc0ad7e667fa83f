"""One file that holds several things: a header that names them all, then their bytes, each with its digest.

    magic 8 | format u32 | header length u32 | blake3 of (the 16 bytes before it and the header) 32
    header    JSON, at most 32 MiB, of at most a million values
    sections  one after the other, as long as the header says; it has blake3 of each
    blake3 of everything before it 32

Bytes and JSON alone: nothing in such a file is a path, a program or a pickle. Reading trusts nothing: how long the file
is bears out what the header claims before anything of that size is read, and whatever is wrong is an ``ImportRefused``.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Self

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field

from agentkv.errors import ImportRefused, InvalidRequest, StorageError
from agentkv.storage.blobs import Buffer, write_error

__all__ = ["HEADER_LIMIT", "Container", "Section", "check_header", "check_target", "section_of", "write_container"]

HEADER_LIMIT = 2**25
"""Bytes of a header: what some eight million tokens take as text."""

_MAGIC = b"AKVMOVE\x1a"
_FORMAT = 1
_PREFIX = struct.Struct("<8sII")
_DIGEST = 32
_PIECE = 2**20
_MOST_VALUES = 2**20
"""A value of JSON may take two bytes and become a hundred."""


class Section(BaseModel):
    """So many bytes of the file, and their blake3."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    nbytes: Annotated[int, Field(ge=0, lt=2**53)]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

    def holds(self, content: Buffer) -> bool:
        """Whether these are its bytes."""
        return memoryview(content).nbytes == self.nbytes and blake3(content).hexdigest() == self.digest


def section_of(content: Buffer) -> Section:
    """What a header says of ``content``."""
    return Section(nbytes=memoryview(content).nbytes, digest=blake3(content).hexdigest())


def check_header(header: bytes) -> str | None:
    """What keeps ``header`` from being one: the limits that hold for reading hold for writing. ``None``: nothing."""
    if len(header) > HEADER_LIMIT:
        return f"a header of {len(header):,} bytes; the limit is {HEADER_LIMIT:,}"
    if (values := sum(map(header.count, (b",", b"[", b"{")))) > _MOST_VALUES:
        return f"a header of up to {values:,} values; the limit is {_MOST_VALUES:,}"
    return None


# -- writing -----------------------------------------------------------------------------------------------------------


def check_target(path: Path, *, replace: bool) -> None:
    """``InvalidRequest`` where no file can be made at ``path``, or one is there already that is not to be replaced."""
    if not path.parent.is_dir():
        raise InvalidRequest(f"there is no folder {path.parent} to write {path.name!r} into", param="path")
    if path.is_dir() or not path.name or "\0" in path.name:
        raise InvalidRequest(f"{str(path)!r} is no file's name: name one", param="path")
    if not replace and os.path.lexists(path):
        advice = "name another file, or pass replace=True (--replace)"
        raise InvalidRequest(f"{path} exists already: {advice}", param="path")


def write_container(
    path: Path,
    header: bytes,
    sections: Sequence[Section],
    contents: Iterable[Buffer],
    *,
    replace: bool,
    go_on: Callable[[], None],
) -> int:
    """Write one, durable on return and readable by its owner alone; its bytes. Blocking.

    ``contents``: those of ``sections``, made one at a time. ``go_on`` is called between them, and raises to end it. No
    failure leaves anything behind, nor touches a file that was at ``path``. ``StorageFull``, ``StorageError``;
    ``InvalidRequest`` as ``check_target``.
    """
    check_target(path, replace=replace)
    temporary = path.with_name(f".agentkv-{secrets.token_hex(8)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            whole = blake3()
            nbytes = 0
            for piece in _pieces(header, sections, contents):
                go_on()
                whole.update(piece)
                nbytes += _write(file.fileno(), piece)
            nbytes += _write(file.fileno(), whole.digest())
            os.fsync(file.fileno())
        go_on()
        check_target(path, replace=replace)
        temporary.rename(path)
        _fsync_folder(path.parent)
    except OSError as error:
        raise write_error(error, f"{path} cannot be written") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return nbytes


def _pieces(header: bytes, sections: Sequence[Section], contents: Iterable[Buffer]) -> Iterator[Buffer]:
    if trouble := check_header(header):
        raise ValueError(trouble)
    prefix = _PREFIX.pack(_MAGIC, _FORMAT, len(header))
    yield prefix + blake3(prefix + header).digest()
    yield header
    for number, (section, content) in enumerate(zip(sections, contents, strict=True)):
        if not section.holds(content):
            raise StorageError(f"what is stored changed while it was exported (section {number}): export it again")
        yield content


def _write(descriptor: int, content: Buffer) -> int:
    left = memoryview(content).cast("B")
    while left:
        left = left[os.write(descriptor, left) :]
    return memoryview(content).nbytes


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot
            raise
    finally:
        os.close(descriptor)


# -- reading -----------------------------------------------------------------------------------------------------------


class Container:
    """An open file of this kind. Blocking; one thread at a time. ``with Container(path) as file``.

    Raises ``ImportRefused`` from every method.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # A pipe without a writer would be waited for: it is opened without, and refused below.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise self.refused("unreadable", getattr(error, "strerror", None) or str(error)) from error
        try:
            status = os.fstat(self._descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise self.refused("unreadable", "it is no regular file")
            self.nbytes = status.st_size
            self._sections: list[tuple[int, Section]] = []
            self._head = self._read_head()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def refused(self, reason: str, detail: str) -> ImportRefused:
        """The error for what is wrong with this file."""
        return ImportRefused(str(self.path), reason, detail)

    @property
    def header(self) -> bytes:
        """The header's JSON, as it was written; what it says is not checked."""
        return self._head[_PREFIX.size + _DIGEST :]

    def check(self, sections: Sequence[Section], go_on: Callable[[], None]) -> None:
        """Read everything once: it is, to the last byte, what was written. ``sections``: what the header says they are;
        ``go_on`` as for ``write_container``."""
        expected = len(self._head) + sum(section.nbytes for section in sections) + _DIGEST
        if self.nbytes != expected:
            reason = "truncated" if self.nbytes < expected else "format"
            raise self.refused(reason, f"it has {self.nbytes:,} bytes where its header makes it {expected:,}")
        whole, at = blake3(self._head), len(self._head)
        self._sections = []
        for number, section in enumerate(sections):
            own, end = blake3(), at + section.nbytes
            while at < end:
                go_on()
                piece = self._read(at, min(_PIECE, end - at))
                at += len(piece)
                own.update(piece)
                whole.update(piece)
            if own.hexdigest() != section.digest:
                raise self.refused("checksum", f"section {number} ({section.nbytes:,} bytes) is not what was written")
            self._sections.append((at - section.nbytes, section))
        if self._read(at, _DIGEST) != whole.digest():
            raise self.refused("checksum", "it is not, as a whole, what was written")

    def content(self, number: int) -> bytes:
        """The bytes of one of the sections that were checked, verified again. Only for what may be in memory."""
        at, section = self._sections[number]
        content = self._read(at, section.nbytes)
        if not section.holds(content):
            raise self.refused("checksum", f"section {number} changed while it was read")
        return content

    def _read_head(self) -> bytes:
        prefix = self._read(0, _PREFIX.size)
        magic, version, length = _PREFIX.unpack(prefix)
        if magic != _MAGIC:
            raise self.refused("format", "it is no exported session")
        if version != _FORMAT:
            raise self.refused("version", f"it has format {version}, this version of agentkv reads {_FORMAT}")
        if length > HEADER_LIMIT:
            raise self.refused("format", f"a header of {length:,} bytes; the limit is {HEADER_LIMIT:,}")
        digest = self._read(_PREFIX.size, _DIGEST)
        header = self._read(_PREFIX.size + _DIGEST, length)
        if blake3(prefix + header).digest() != digest:
            raise self.refused("checksum", "the header is not what was written")
        if trouble := check_header(header):
            raise self.refused("format", trouble)
        return prefix + digest + header

    def _read(self, at: int, nbytes: int) -> bytes:
        """Exactly so many bytes from there; the file's length says first whether there are as many."""
        if at + nbytes > self.nbytes:
            raise self.refused("truncated", f"it ends at byte {self.nbytes:,}, where {at + nbytes:,} were due")
        found = b""
        try:
            while len(found) < nbytes and (more := os.pread(self._descriptor, nbytes - len(found), at + len(found))):
                found += more
        except (OSError, MemoryError) as error:
            raise self.refused("unreadable", str(error)) from error
        if len(found) != nbytes:
            raise self.refused("truncated", f"it ends at byte {at + len(found):,}, where {at + nbytes:,} were due")
        return found
