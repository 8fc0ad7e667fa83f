"""``kill -9`` at every named point of a put: the next open finds blobs whole or not at all, and counts every byte."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentkv.storage.local import LocalBlobs

NEW = {"ab34": bytes(range(256)) * 300, "ab56": b"second" * 5000, "cd78": b"third" * 9000}
OLD = {"ab12": b"kept" * 2000, "ab34": b"replaced by the group" * 100}
POINTS = (
    "blob.before_write",
    "blob.mid_write",
    "blob.after_write",
    "blob.before_rename",
    "blob.after_rename",
    "blob.after_folder_fsync",
)
WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from tests.faults.test_local_blobs_kill import NEW
from agentkv.storage.local import LocalBlobs
blobs = LocalBlobs(sys.argv[1])
print("open", flush=True)
blobs.put_many([(name, [data[:1000], data[1000:]]) for name, data in NEW.items()])
print("durable", flush=True)
"""


def write_and_die(root: Path, fault: str) -> tuple[int, list[str]]:
    """Put ``NEW`` in a process of its own with ``fault`` armed: its exit status and the lines it got to say."""
    repository = Path(__file__).parents[2]
    program = [sys.executable, "-c", WRITER, str(root), str(repository)]
    environment = {**os.environ, "AGENTKV_FAULT": fault, "PYTHONPATH": str(repository)}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, cwd=repository)
    assert done.stderr == ""
    return done.returncode, done.stdout.split()


@pytest.mark.short(6)
@pytest.mark.parametrize("passing", [1, 2, 3])
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_leaves_every_blob_whole_or_absent(tmp_path: Path, point: str, passing: int) -> None:
    LocalBlobs(tmp_path).put_many([(name, [data]) for name, data in OLD.items()])
    status, said = write_and_die(tmp_path, f"{point}:{passing}")
    if point == "blob.after_folder_fsync" and passing == 3:  # two folders, two syncs: it lived
        assert (status, said) == (0, ["open", "durable"])
    else:
        assert (status, said) == (-signal.SIGKILL, ["open"])

    blobs = LocalBlobs(tmp_path)
    found = dict(blobs.list())
    assert found.keys() >= OLD.keys()
    for name in found:
        assert bytes(blobs.get(name)) in (OLD.get(name), NEW.get(name))
        assert blobs.size(name) == found[name] == len(blobs.get(name))
    if "folder" in point:
        assert all(bytes(blobs.get(name)) == data for name, data in NEW.items())
    if point == "blob.after_rename":
        assert sum(bytes(blobs.get(name)) == NEW[name] for name in found.keys() & NEW.keys()) == passing
    if "write" in point:
        assert found == {name: len(data) for name, data in OLD.items()}

    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in left} == found.keys()
    assert blobs.used_bytes() == sum(path.stat().st_size for path in left) == blobs.swept.blob_bytes
    assert (blobs.swept.temporaries == 0) == (blobs.swept.temporary_bytes == 0)
    if point in ("blob.mid_write", "blob.after_write", "blob.before_rename"):
        assert blobs.swept.temporaries > 0

    blobs.put_many([(name, [data]) for name, data in NEW.items()])
    assert {name: bytes(blobs.get(name)) for name, _ in blobs.list()} == {**OLD, **NEW}


def test_an_armed_point_is_passed_until_its_turn(tmp_path: Path) -> None:
    assert write_and_die(tmp_path, "blob.before_write:4") == (0, ["open", "durable"])
    assert write_and_die(tmp_path, "no.such.point") == (0, ["open", "durable"])


@pytest.mark.parametrize("armed", ["blob.before_write:0", "blob.before_write:x"])
def test_a_fault_that_makes_no_sense_is_refused_at_import(armed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import agentkv.storage.faultpoints"],
        env={**os.environ, "AGENTKV_FAULT": armed},
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 1 and "AGENTKV_FAULT" in done.stderr
