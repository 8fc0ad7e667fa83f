"""Blobs on a real file system: modes, durability order, budgets, full and read-only disks."""

from __future__ import annotations

import os
import stat
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentkv.errors import ChunkFault, StorageError, StorageFull
from agentkv.storage import local
from agentkv.storage.blobs import BlobStore
from agentkv.storage.local import LocalBlobs
from agentkv.storage.memory import MemoryBlobs


def bytes_under(root: Path) -> int:
    """What a user's ``find -type f`` would add up."""
    return sum(path.lstat().st_size for path in root.rglob("*") if not path.is_dir())


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    """Both back-ends, with a budget of 16,000 bytes: the contract's tests run on each."""
    if request.param == "memory":
        return MemoryBlobs(16_000)
    return LocalBlobs(tmp_path / "blobs", budget_bytes=16_000)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte; skipped where mounting is not allowed."""
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_what_was_put_is_what_is_got(store: BlobStore) -> None:
    assert store.put("ab12", [b"one", bytearray(b"two"), memoryview(b"three"), b""]) == 11
    assert bytes(store.get("ab12")) == b"onetwothree"
    assert bytes(store.get("ab12", limit=4)) == b"onet"
    assert store.exists("ab12") and store.size("ab12") == 11
    assert dict(store.list()) == {"ab12": 11} and store.used_bytes() == 11


def test_a_blob_replaces_one_of_the_same_name_and_bytes_stay_exact(store: BlobStore) -> None:
    store.put("ab12", [bytes(900)])
    store.put("ab12", [b"x" * 100])
    assert (bytes(store.get("ab12")), store.used_bytes()) == (b"x" * 100, 100)


def test_a_group_is_put_whole(store: BlobStore) -> None:
    assert store.put_many([("ab12", [b"1"]), ("ab34", [b"22"]), ("cd56", [b"333"])]) == 6
    assert dict(store.list()) == {"ab12": 1, "ab34": 2, "cd56": 3}
    assert store.put_many([]) == 0
    with pytest.raises(ValueError, match="twice"):
        store.put_many([("ab12", [b"1"]), ("ab12", [b"2"])])


def test_missing_is_a_fault_for_readers_and_no_matter_for_deleters(store: BlobStore) -> None:
    for read in (store.get, store.size):
        with pytest.raises(ChunkFault) as caught:
            read("ab12")
        assert (caught.value.reason, caught.value.chunk_id) == ("missing", "ab12")
    assert not store.exists("ab12") and not store.delete("ab12") and not store.quarantine("ab12", "checksum")


def test_delete_gives_the_bytes_back(store: BlobStore) -> None:
    store.put("ab12", [bytes(16_000)])
    assert store.delete("ab12") and store.used_bytes() == 0 and not store.exists("ab12")
    store.put("cd34", [bytes(16_000)])


def test_a_full_budget_refuses_with_numbers_and_leaves_nothing(store: BlobStore) -> None:
    store.put("ab12", [bytes(15_000)])
    with pytest.raises(StorageFull, match=r"1,001 more bytes .*15,000 of a budget of 16,000"):
        store.put_many([("cd34", [bytes(1000)]), ("ef56", [b"x"])])
    assert dict(store.list()) == {"ab12": 15_000} and store.used_bytes() == 15_000
    store.put("cd34", [bytes(1000)])


@pytest.mark.parametrize("name", ["", "a", "../x", "ab/cd", "AB12", ".tmp-1", "a" * 200, "ab\n", "ab\0"])
def test_only_plain_names_become_paths(store: BlobStore, name: str) -> None:
    for write in (lambda: store.put(name, [b"x"]), lambda: store.delete(name), lambda: store.quarantine(name, "x")):
        if isinstance(store, LocalBlobs) or "put" in write.__code__.co_names:
            with pytest.raises(ValueError, match="cannot name a blob"):
                write()
    with pytest.raises(ChunkFault):
        store.get(name)
    assert not store.exists(name)


def test_a_quarantined_blob_is_counted_and_not_served(store: BlobStore) -> None:
    store.put("ab12", [bytes(600)])
    assert store.quarantine("ab12", "checksum")
    assert not store.exists("ab12") and dict(store.list()) == {}
    with pytest.raises(ChunkFault, match="missing"):
        store.get("ab12")
    assert store.used_bytes() == 600
    report = store.sweep()
    assert (report.quarantined, report.quarantine_bytes, report.blobs) == (1, 600, 0)
    store.put("ab12", [b"computed again"])
    assert bytes(store.get("ab12")) == b"computed again"


def test_quarantine_is_bounded_and_gives_way_to_new_blobs(store: BlobStore) -> None:
    for name in ("ab12", "cd34", "ef56"):
        store.put(name, [bytes(400)])
        store.quarantine(name, "checksum")
    assert store.used_bytes() == 800  # a sixteenth of the budget is 1,000: the oldest went
    store.put("aa00", [bytes(15_500)])
    assert store.used_bytes() == 15_900
    store.delete("aa00")
    store.put("aa00", [bytes(1500)])
    store.quarantine("aa00", "larger than all the room there is")
    assert store.used_bytes() == 0


def test_many_writers_never_pass_the_budget_and_bytes_stay_exact(store: BlobStore) -> None:
    barrier = threading.Barrier(4)
    refused = 0

    def writer(n: int) -> int:
        barrier.wait()
        full = 0
        for i in range(20):
            name = f"{i % 5:02x}{n}"
            try:
                store.put(name, [bytes(1997 + n), b"tail"])
            except StorageFull:
                full += 1
            assert store.used_bytes() <= 16_000
            if i % 3 == 0:
                store.delete(name)
        return full

    with ThreadPoolExecutor(4) as pool:
        refused = sum(pool.map(writer, range(4)))
    assert refused > 0
    assert store.used_bytes() == sum(n for _, n in store.list())


def test_files_and_folders_are_the_owners_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        blobs = LocalBlobs(tmp_path / "deep" / "blobs")
        blobs.put("ab12", [b"private"])
        blobs.put("cd34", [b"private too"])
        blobs.quarantine("cd34", "checksum")
    finally:
        os.umask(before)
    root = tmp_path / "deep" / "blobs"
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [root, *root.rglob("*")]}
    assert len(modes) == 6
    for path, mode in modes.items():
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_file_rename_folder_are_synced_in_this_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = LocalBlobs(tmp_path)
    blobs.put("ab00", [b"x"])
    seen: list[str] = []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (seen.append(Path(f"/proc/self/fd/{fd}").readlink().name), fsync(fd)))
    monkeypatch.setattr(Path, "rename", lambda self, to: (seen.append(f"rename {to.name}"), rename(self, to)))
    blobs.put_many([("ab12", [b"1"]), ("ab34", [b"2"]), ("cd56", [b"3"])])
    seen = [".tmp" if name.startswith(".tmp") else name for name in seen]
    assert seen[:4] == [".tmp", ".tmp", tmp_path.name, ".tmp"]  # the new folder cd is durable in its parent first
    assert seen[4:7] == ["rename ab12", "rename ab34", "rename cd56"]
    assert sorted(seen[7:]) == ["ab", "cd"]


def test_a_second_open_counts_what_the_first_left(tmp_path: Path) -> None:
    first = LocalBlobs(tmp_path)
    first.put_many([("ab12", [bytes(100)]), ("cd34", [bytes(50)]), ("ef56", [bytes(7)])])
    first.quarantine("ef56", "checksum")
    (tmp_path / "ab" / ".tmp-77-0").write_bytes(bytes(33))
    (tmp_path / "stranger.txt").write_bytes(bytes(5))
    again = LocalBlobs(tmp_path)
    report = again.swept
    assert (report.temporaries, report.temporary_bytes) == (1, 33)
    assert (report.blobs, report.blob_bytes, report.quarantined, report.quarantine_bytes) == (2, 150, 1, 7)
    assert again.used_bytes() == 162 == bytes_under(tmp_path)
    assert dict(again.list()) == {"ab12": 100, "cd34": 50}


def test_a_sweep_leaves_a_write_under_way_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = LocalBlobs(tmp_path)
    swept = []

    def sweep_now(name: str) -> None:
        if name == "blob.after_write":
            swept.append(blobs.sweep())
            assert blobs.used_bytes() == 3

    monkeypatch.setattr(local, "fault_point", sweep_now)
    blobs.put("ab12", [b"abc"])
    assert [report.temporaries for report in swept] == [0]
    assert bytes(blobs.get("ab12")) == b"abc"


@pytest.mark.parametrize("point", ["blob.mid_write", "blob.after_write", "blob.before_rename", "blob.after_rename"])
@pytest.mark.parametrize(
    ("error", "kind"), [(OSError(5, "Input/output error"), StorageError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_a_failed_group_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
    error: BaseException,
    kind: type[BaseException],
) -> None:
    blobs = LocalBlobs(tmp_path)
    blobs.put("ab12", [bytes(10)])
    passed = 0

    def fail(name: str) -> None:
        nonlocal passed
        passed += name == point
        if name == point and passed == 2:
            raise error

    monkeypatch.setattr(local, "fault_point", fail)
    with pytest.raises(kind):
        blobs.put_many([("ab34", [bytes(20)]), ("cd56", [bytes(30)]), ("cd78", [bytes(40)])])
    assert dict(blobs.list()) == {"ab12": 10}
    assert blobs.used_bytes() == 10 == bytes_under(tmp_path)
    monkeypatch.undo()
    blobs.put_many([("ab34", [bytes(20)]), ("cd56", [bytes(30)])])
    assert blobs.used_bytes() == 60 == bytes_under(tmp_path)


def test_a_full_disk_refuses_and_leaves_nothing(tmpfs: Path) -> None:
    blobs = LocalBlobs(tmpfs / "blobs")
    blobs.put("ab12", [bytes(400_000)])
    (tmpfs / "someone else").write_bytes(bytes(600_000))
    with pytest.raises(StorageFull, match="bytes free"):
        blobs.put("cd34", [bytes(300_000)])
    assert bytes(blobs.get("ab12")) == bytes(400_000)
    assert blobs.used_bytes() == 400_000 == bytes_under(tmpfs / "blobs")


def test_a_disk_that_fills_up_while_writing_refuses_and_leaves_nothing(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = LocalBlobs(tmpfs / "blobs")
    blobs.put("ab12", [bytes(1000)])

    def fill_up(name: str) -> None:
        if name == "blob.before_write" and not (tmpfs / "rest").exists():
            with pytest.raises(OSError), (tmpfs / "rest").open("wb", buffering=0) as rest:
                while rest.write(bytes(4096)):
                    pass

    monkeypatch.setattr(local, "fault_point", fill_up)
    with pytest.raises(StorageFull, match="ENOSPC"):
        blobs.put_many([("cd34", [bytes(100)]), ("ef56", [bytes(300_000)])])
    assert dict(blobs.list()) == {"ab12": 1000}
    assert blobs.used_bytes() == 1000 == bytes_under(tmpfs / "blobs")
    monkeypatch.undo()
    (tmpfs / "rest").unlink()
    blobs.put("ef56", [bytes(300_000)])


def test_the_free_space_margin_is_kept(tmpfs: Path) -> None:
    blobs = LocalBlobs(tmpfs / "blobs", margin_bytes=500_000)
    blobs.put("ab12", [bytes(300_000)])
    with pytest.raises(StorageFull, match="500,000 of them stay free"):
        blobs.put("cd34", [bytes(300_000)])
    assert blobs.used_bytes() == 300_000


def test_a_disk_gone_read_only_refuses_writes_and_still_reads(tmpfs: Path) -> None:
    blobs = LocalBlobs(tmpfs / "blobs")
    blobs.put_many([("ab12", [b"abc"]), ("cd34", [b"bad"])])
    subprocess.run(["mount", "-o", "remount,ro", tmpfs], check=True)
    with pytest.raises(StorageFull, match="EROFS"):
        blobs.put("ab34", [b"x"])
    with pytest.raises(StorageFull, match="EROFS"):
        blobs.delete("ab12")
    assert bytes(blobs.get("ab12")) == b"abc"
    assert blobs.quarantine("cd34", "checksum")
    assert not blobs.exists("cd34") and dict(blobs.list()) == {"ab12": 3}
    with pytest.raises(ChunkFault, match="missing"):
        blobs.get("cd34")
    assert blobs.used_bytes() == 6
    with pytest.raises(StorageFull):
        LocalBlobs(tmpfs / "blobs")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes where it likes")
def test_a_folder_without_permission_refuses(tmp_path: Path) -> None:
    blobs = LocalBlobs(tmp_path / "blobs")
    blobs.put("ab12", [b"abc"])
    (tmp_path / "blobs" / "ab").chmod(0o500)
    with pytest.raises(StorageFull, match="EACCES"):
        blobs.put("ab34", [b"x"])
    assert blobs.used_bytes() == 3


def test_opening_where_no_folder_can_be_is_loud(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot be opened"):
        LocalBlobs(tmp_path / "file" / "blobs")


def test_what_is_no_regular_file_is_unreadable(tmp_path: Path) -> None:
    blobs = LocalBlobs(tmp_path)
    blobs.put("ab00", [b"x"])
    (tmp_path / "ab" / "ab12").mkdir()
    (tmp_path / "ab" / "ab34").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "ab" / "ab56")
    for name in ("ab12", "ab34", "ab56"):
        with pytest.raises(ChunkFault) as caught:
            blobs.get(name)
        assert caught.value.reason == "unreadable"
