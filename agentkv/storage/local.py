"""Blobs as files of one folder: temporary name, fsync, rename, folder fsync.

    root/ab/ab12…          a blob; the folder is the name's first two characters
    root/ab/.tmp-PID-N     being written; after a crash swept at the next open
    root/quarantine/TIME-NAME.REASON

Folders are 0700, files 0600: KV is private text in another form. One process owns the root (the home's lock).
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agentkv.errors import ChunkFault, StorageError, StorageFull
from agentkv.storage.blobs import (
    BlobStore,
    Parts,
    Scratch,
    SweepReport,
    check_name,
    is_name,
    parts_nbytes,
    quarantine_room,
    write_error,
)
from agentkv.storage.faultpoints import fault_point

__all__ = ["LocalBlobs"]

_TEMPORARY = ".tmp-"
_QUARANTINE = "quarantine"
_QUARANTINE_FILES = 64
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(slots=True)
class _Staged:
    """One blob on its way: ``counted`` bytes are in ``used_bytes``; ``renamed`` once it has its final name."""

    name: str
    temporary: Path
    final: Path
    counted: int
    renamed: bool = False
    replaced: bool = False


class LocalBlobs(BlobStore):
    """A ``BlobStore`` in the folder ``root``, made where it is missing and swept at once.

    ``budget_bytes`` bounds every byte under ``root``; ``margin_bytes`` of the file system are left free. Opening raises
    ``StorageFull`` or ``StorageError`` where the folder cannot be made, listed or written to.
    """

    def __init__(self, root: str | os.PathLike[str], *, budget_bytes: int = 2**62, margin_bytes: int = 0) -> None:
        self.root = Path(root)
        self.budget_bytes = budget_bytes
        self.margin_bytes = margin_bytes
        self._lock = threading.Lock()
        self._folder_lock = threading.Lock()
        self._numbers = itertools.count()
        self._in_flight: dict[Path, int] = {}
        self._unwritten = 0
        self._refused: set[str] = set()
        self._used = 0
        try:
            (self.root / _QUARANTINE).mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(self.root, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "not writable")
            self.root.chmod(0o700)
            self._used = sum(size for _, size in _walk(self.root))
            self._quarantined = sorted((Path(path), size) for path, size in _walk(self.root / _QUARANTINE))
            _fsync_folder(self.root)
            self._folders = {entry.name for entry in os.scandir(self.root) if entry.is_dir(follow_symlinks=False)}
        except OSError as error:
            raise write_error(error, f"the blob folder {self.root} cannot be opened") from error
        self.swept = self.sweep()

    def put_many(self, items: Sequence[tuple[str, Parts]]) -> int:
        """See ``BlobStore``. One fsync a file, then one a folder."""
        names = [check_name(name) for name, _ in items]
        if len(set(names)) != len(names):
            raise ValueError("one name twice in a group put")
        nbytes = sum(parts_nbytes(parts) for _, parts in items)
        staged: list[_Staged] = []
        self._reserve(nbytes)
        try:
            for name, parts in items:
                staged.append(self._stage(name))
                self._write(staged[-1], parts)
            for blob in staged:
                self._publish(blob)
            for folder in {blob.final.parent for blob in staged}:
                _fsync_folder(folder)
                fault_point("blob.after_folder_fsync")
        except BaseException as error:
            self._abandon(staged, nbytes)
            if isinstance(error, OSError):
                raise write_error(error, f"{nbytes:,} bytes cannot be written to {self.root}") from error
            raise
        return nbytes

    def get(self, name: str, *, limit: int | None = None) -> bytes:
        """See ``BlobStore``. One read into one buffer: a mapping would turn a bad sector into a SIGBUS."""
        try:
            with os.fdopen(self._open(name), "rb", buffering=0) as file:
                nbytes = _regular_size(file.fileno(), name)
                wanted = nbytes if limit is None else min(limit, nbytes)
                data = file.read(wanted) or b""
                while len(data) < wanted and (more := file.read(wanted - len(data))):
                    data += more
                return data
        except (OSError, MemoryError) as error:
            raise ChunkFault(name, "unreadable", str(error)) from error

    def read_into(self, name: str, scratch: Scratch) -> memoryview:
        """See ``BlobStore``."""
        try:
            with os.fdopen(self._open(name), "rb", buffering=0) as file:
                view = scratch.room(_regular_size(file.fileno(), name))
                done = 0
                while done < len(view) and (got := file.readinto(view[done:])):
                    done += got
                return view[:done]
        except (OSError, MemoryError) as error:
            raise ChunkFault(name, "unreadable", str(error)) from error

    def delete(self, name: str) -> bool:
        """See ``BlobStore``."""
        path = self._path(check_name(name))
        with self._lock:
            try:
                nbytes = path.lstat().st_size
                path.unlink()
            except FileNotFoundError:
                return False
            except OSError as error:
                raise write_error(error, f"blob {name} cannot be deleted") from error
            self._used -= nbytes
        return True

    def exists(self, name: str) -> bool:
        """See ``BlobStore``."""
        return is_name(name) and name not in self._refused and self._path(name).is_file()

    def size(self, name: str) -> int:
        """See ``BlobStore``."""
        if not self.exists(name):
            raise ChunkFault(name, "missing", f"no such file under {self.root}")
        try:
            return self._path(name).stat().st_size
        except OSError as error:
            raise ChunkFault(name, "unreadable", str(error)) from error

    def quarantine(self, name: str, reason: str) -> bool:
        """See ``BlobStore``. On a read-only disk the file stays where it is, and is refused by this process."""
        path = self._path(check_name(name))
        label = re.sub(r"[^a-z]", "_", reason.lower())[:32]
        with self._lock:
            aside = self.root / _QUARANTINE / f"{time.time_ns():020d}-{name}.{label}"
            try:
                nbytes = path.lstat().st_size
                path.rename(aside)
            except FileNotFoundError:
                return False
            except OSError:
                self._refused.add(name)
                return True
            self._quarantined.append((aside, nbytes))
            room = quarantine_room(self.budget_bytes)
            while len(self._quarantined) > _QUARANTINE_FILES or sum(n for _, n in self._quarantined) > room:
                if not self._drop_oldest():
                    break
        return True

    def sweep(self) -> SweepReport:
        """See ``BlobStore``. Runs at open; a home has one owner, so every other temporary is an orphan."""
        temporaries = temporary_bytes = blobs = blob_bytes = 0
        for found, nbytes in _walk(self.root):
            if os.path.basename(found).startswith(_TEMPORARY):  # noqa: PTH119
                path = Path(found)
                with self._lock:
                    if path not in self._in_flight and _unlink(path):
                        self._used -= nbytes
                        temporaries, temporary_bytes = temporaries + 1, temporary_bytes + nbytes
            elif self._blob_name(found) is not None:
                blobs, blob_bytes = blobs + 1, blob_bytes + nbytes
        with self._lock:
            quarantined = [nbytes for _, nbytes in self._quarantined]
        return SweepReport(temporaries, temporary_bytes, blobs, blob_bytes, len(quarantined), sum(quarantined))

    def used_bytes(self) -> int:
        """See ``BlobStore``. Counted once at open, kept up to date since; file lengths, not disk blocks."""
        return self._used

    def list(self) -> Iterator[tuple[str, int]]:
        """See ``BlobStore``."""
        try:
            for path, nbytes in _walk(self.root):
                if (name := self._blob_name(path)) is not None and name not in self._refused:
                    yield name, nbytes
        except OSError as error:
            raise StorageError(f"the blob folder {self.root} cannot be listed: {error}") from error

    def _path(self, name: str) -> Path:
        return self.root / name[:2] / name

    def _blob_name(self, path: str) -> str | None:
        """The blob that this file is; ``None`` where it is none."""
        name = os.path.basename(path)  # noqa: PTH119
        return name if is_name(name) and path == f"{self.root}/{name[:2]}/{name}" else None

    def _open(self, name: str) -> int:
        if not is_name(name) or name in self._refused:
            raise ChunkFault(name, "missing", f"no such file under {self.root}")
        try:
            return os.open(self._path(name), _READ_FLAGS)
        except FileNotFoundError:
            raise ChunkFault(name, "missing", f"no such file under {self.root}") from None

    def _reserve(self, nbytes: int) -> None:
        """Count ``nbytes`` before the first of them is written; ``StorageFull`` where budget or margin forbid it."""
        with self._lock:
            while self._used + nbytes > self.budget_bytes and self._drop_oldest():
                pass
            if self._used + nbytes > self.budget_bytes:
                raise StorageFull(
                    f"{nbytes:,} more bytes do not fit: {self._used:,} of a budget of {self.budget_bytes:,} bytes are "
                    f"used under {self.root}; delete sessions or raise disk_budget"
                )
            try:
                disk = os.statvfs(self.root)
            except OSError as error:
                raise write_error(error, f"the blob folder {self.root} is gone") from error
            free = disk.f_bavail * disk.f_frsize - self._unwritten
            if free - nbytes < self.margin_bytes:
                raise StorageFull(
                    f"{nbytes:,} more bytes do not fit: the file system of {self.root} has {free:,} bytes free and "
                    f"{self.margin_bytes:,} of them stay free; free space or lower disk_margin"
                )
            self._used += nbytes
            self._unwritten += nbytes

    def _stage(self, name: str) -> _Staged:
        folder = self._folder(name[:2])
        temporary = folder / f"{_TEMPORARY}{os.getpid()}-{next(self._numbers)}"
        return _Staged(name, temporary, folder / name, counted=0)

    def _folder(self, prefix: str) -> Path:
        """The fan-out folder, its own entry durable before any file in it claims to be."""
        folder = self.root / prefix
        if prefix not in self._folders:
            with self._folder_lock:
                folder.mkdir(mode=0o700, exist_ok=True)
                _fsync_folder(self.root)
                self._folders.add(prefix)
        return folder

    def _write(self, blob: _Staged, parts: Parts) -> None:
        """The whole content under its temporary name, fsynced."""
        nbytes = parts_nbytes(parts)
        with self._lock:
            self._in_flight[blob.temporary] = nbytes
        blob.counted = nbytes
        fault_point("blob.before_write")
        descriptor = os.open(blob.temporary, _WRITE_FLAGS, 0o600)
        try:
            for part in parts:
                view = memoryview(part).cast("B")
                while view:
                    view = view[os.write(descriptor, view) :]
                fault_point("blob.mid_write")
            fault_point("blob.after_write")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        with self._lock:
            self._unwritten -= nbytes
            self._in_flight[blob.temporary] = 0

    def _publish(self, blob: _Staged) -> None:
        fault_point("blob.before_rename")
        with self._lock:
            # Under the lock, so that the length replaced is the length that was counted.
            with suppress(FileNotFoundError):
                before = blob.final.lstat().st_size
                blob.replaced = True
            blob.temporary.rename(blob.final)
            blob.renamed = True
            self._in_flight.pop(blob.temporary)
            self._refused.discard(blob.name)
            if blob.replaced:
                self._used -= before
        fault_point("blob.after_rename")

    def _abandon(self, staged: Sequence[_Staged], reserved: int) -> None:
        """Undo a group put: what cannot be removed stays counted. A blob that replaced one stays, whole."""
        with self._lock:
            for blob in staged:
                reserved -= blob.counted
                self._unwritten -= self._in_flight.pop(blob.temporary, 0)
                path = blob.final if blob.renamed else blob.temporary
                if not (blob.renamed and blob.replaced) and _unlink(path):
                    self._used -= blob.counted
            self._used -= reserved
            self._unwritten -= reserved

    def _drop_oldest(self) -> bool:
        """Delete the oldest quarantined file; ``False`` where there is none, or it will not go."""
        if not self._quarantined:
            return False
        path, nbytes = self._quarantined[0]
        if not _unlink(path):
            return False
        del self._quarantined[0]
        self._used -= nbytes
        return True


def _regular_size(descriptor: int, name: str) -> int:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise ChunkFault(name, "unreadable", "not a regular file")
    return status.st_size


def _walk(folder: Path | str) -> Iterator[tuple[str, int]]:
    """(path, bytes) of every file below ``folder``, links counted as themselves; what vanishes meanwhile is skipped.

    Plain strings: a home has tens of thousands of files, and making a ``Path`` of each takes longer than finding it.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if entry.is_dir(follow_symlinks=False):
                    yield from _walk(entry.path)
                else:
                    yield entry.path, entry.stat(follow_symlinks=False).st_size


def _unlink(path: Path) -> bool:
    """Whether the file is gone now; a read-only disk says EROFS even of what is not there."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
    return not os.path.lexists(path)


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
