"""Blobs in an object store when the way to it fails: a real S3 server, real HTTP, a real proxy that spoils it."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from s3 import ACCESS_KEY, S3, SECRET_KEY, FaultyWay, faulty_way, s3_server

from agentkv.errors import AgentKVError, ChunkFault, InvalidRequest, StorageError, StorageFull
from agentkv.storage import endpoint
from agentkv.storage.encrypted import EncryptedBlobs
from agentkv.storage.local import LocalBlobs
from agentkv.storage.memory import MemoryBlobs
from agentkv.storage.opening import open_blobs
from agentkv.storage.remote import RemoteBlobs


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_server() as server:
        yield server


@pytest.fixture
def way(s3: S3) -> Iterator[FaultyWay]:
    with faulty_way(s3) as way:
        yield way


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test heals the way and goes on at once; the pause has tests of its own."""
    monkeypatch.setattr(endpoint, "_PAUSE_SECONDS", 0.0)


@pytest.fixture
def blobs(s3: S3, way: FaultyWay) -> RemoteBlobs:
    """A store behind the faulty way, with one blob ``ab12`` of 10 bytes."""
    store = RemoteBlobs(s3.url(), config=s3.config(way.port), timeout_seconds=0.5, put_timeout_seconds=0.5)
    store.put("ab12", [bytes(10)])
    way.seen.clear()
    return store


def on_the_server(s3: S3, store: RemoteBlobs) -> dict[str, int]:
    """Blobs as another process would find them."""
    return dict(RemoteBlobs(store.url, config=s3.config()).list())


def spoil(outcome: str, method: str, *keys: str) -> Callable[[str, str], str]:
    return lambda m, key: outcome if m == method and (not keys or key in keys) else "pass"


@pytest.mark.short(1)
@pytest.mark.parametrize("outcome", ["503", "reset", "hang", "lost"])
def test_a_failed_group_leaves_nothing(s3: S3, way: FaultyWay, blobs: RemoteBlobs, outcome: str) -> None:
    way.rule = spoil(outcome, "PUT", "cd56")
    with pytest.raises(StorageError, match=r"60 bytes cannot be written to s3://.*: the (store|endpoint) ") as caught:
        blobs.put_many([("ab34", [bytes(20)]), ("cd56", [bytes(40)])])
    assert not isinstance(caught.value, StorageFull)
    assert dict(blobs.list()) == {"ab12": 10} == on_the_server(s3, blobs)
    assert blobs.used_bytes() == 10 and not blobs.exists("ab34")
    assert 2 <= len([key for method, key, _ in way.seen if (method, key) == ("PUT", "cd56")]) <= 4  # bounded retries
    way.heal()
    blobs.put_many([("ab34", [bytes(20)]), ("cd56", [bytes(30)])])
    assert dict(blobs.list()) == {"ab12": 10, "ab34": 20, "cd56": 30} == on_the_server(s3, blobs)


def test_a_short_trouble_is_retried_unseen(s3: S3, way: FaultyWay, blobs: RemoteBlobs) -> None:
    left = {"PUT": 2, "GET": 2}

    def rule(method: str, key: str) -> str:
        left[method] = left.get(method, 0) - 1
        return "503" if left[method] >= 0 else "pass"

    way.rule = rule
    blobs.put("cd34", [b"abc"])
    assert bytes(blobs.get("cd34")) == b"abc"
    assert [method for method, _, _ in way.seen] == ["PUT"] * 3 + ["GET"] * 3


def test_what_cannot_be_taken_back_stays_counted_until_a_sweep(s3: S3, way: FaultyWay, blobs: RemoteBlobs) -> None:
    way.rule = lambda method, key: {"PUT": "lost", "DELETE": "503", "POST": "503"}.get(method, "pass")
    with pytest.raises(StorageError):
        blobs.put("cd34", [bytes(30)])
    assert blobs.used_bytes() == 40 and not blobs.exists("cd34") and dict(blobs.list()) == {"ab12": 10}
    assert on_the_server(s3, blobs) == {"ab12": 10, "cd34": 30}
    assert blobs.sweep().temporaries == 0
    way.heal()
    report = blobs.sweep()
    assert (report.temporaries, report.temporary_bytes, report.blob_bytes) == (1, 30, 10)
    assert blobs.used_bytes() == 10 and on_the_server(s3, blobs) == {"ab12": 10}


def test_the_next_put_takes_back_what_a_failed_one_left(
    s3: S3, way: FaultyWay, blobs: RemoteBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "_PAUSE_SECONDS", 0.5)
    way.rule = spoil("503", "PUT", "cd56")
    with pytest.raises(StorageError):
        blobs.put_many([("ab34", [bytes(20)]), ("cd56", [bytes(40)])])
    assert dict(blobs.list()) == {"ab12": 10} and blobs.used_bytes() == 70  # not to be asked for their deletion yet
    way.heal()
    time.sleep(0.6)
    blobs.put("ab34", [b"x"])
    assert dict(blobs.list()) == {"ab12": 10, "ab34": 1} == on_the_server(s3, blobs) and blobs.used_bytes() == 11


def test_a_failed_replacement_leaves_a_whole_blob(s3: S3, way: FaultyWay, blobs: RemoteBlobs) -> None:
    way.rule = spoil("lost", "PUT")
    with pytest.raises(StorageError):
        blobs.put("ab12", [b"x" * 7])
    way.heal()
    assert bytes(blobs.get("ab12")) == b"x" * 7
    assert blobs.used_bytes() == 10  # either may be there: the larger is counted
    assert blobs.delete("ab12") and blobs.used_bytes() == 0


@pytest.mark.short(1)
@pytest.mark.parametrize("outcome", ["503", "reset", "hang", "half"])
def test_a_read_without_an_answer_is_a_fault_that_moves_nothing(
    s3: S3, way: FaultyWay, blobs: RemoteBlobs, outcome: str
) -> None:
    way.rule = spoil(outcome, "GET")
    with pytest.raises(
        ChunkFault, match=r"the (store|endpoint) (answers 503|does not answer|cannot be reached)"
    ) as caught:
        blobs.get("ab12")
    assert (caught.value.reason, caught.value.chunk_id) == ("unreachable", "ab12")
    assert blobs.exists("ab12") and blobs.used_bytes() == 10
    way.heal()
    assert bytes(blobs.get("ab12")) == bytes(10)


def test_a_limit_moves_only_so_many_bytes(way: FaultyWay, blobs: RemoteBlobs) -> None:
    blobs.put("cd34", [bytes(500_000)])
    way.seen.clear()
    assert bytes(blobs.get("cd34", limit=1000)) == bytes(1000)
    assert blobs.size("cd34") == 500_000 and blobs.exists("cd34") and not blobs.exists("cd56")
    assert way.seen == [("GET", "cd34", 1000)]


def test_a_blob_that_somebody_removed_is_missing_and_no_longer_counted(s3: S3, blobs: RemoteBlobs) -> None:
    RemoteBlobs(blobs.url, config=s3.config()).delete("ab12")
    with pytest.raises(ChunkFault, match="missing"):
        blobs.get("ab12")
    assert not blobs.exists("ab12") and blobs.used_bytes() == 0


@pytest.mark.parametrize("method", ["PUT", "DELETE", "POST"])
def test_what_cannot_be_moved_aside_is_refused_and_counted(
    s3: S3, way: FaultyWay, blobs: RemoteBlobs, method: str
) -> None:
    way.rule = spoil("503", method)
    assert blobs.quarantine("ab12", "checksum")
    assert not blobs.exists("ab12") and dict(blobs.list()) == {}
    way.heal()
    direct = RemoteBlobs(blobs.url, config=s3.config())
    assert blobs.used_bytes() == direct.used_bytes()
    blobs.sweep()
    assert blobs.put("ab12", [b"again"]) == 5 and bytes(blobs.get("ab12")) == b"again"
    assert blobs.used_bytes() == RemoteBlobs(blobs.url, config=s3.config()).used_bytes()


def test_put_and_delete_of_one_name_take_turns(s3: S3, way: FaultyWay, blobs: RemoteBlobs) -> None:
    blobs = RemoteBlobs(blobs.url, config=s3.config(way.port))  # patient
    way.rule = spoil("slow", "PUT")
    with ThreadPoolExecutor(2) as pool:
        put = pool.submit(blobs.put, "ab12", [b"new"])
        while not way.seen:
            time.sleep(0.01)
        delete = pool.submit(blobs.delete, "ab12")
        time.sleep(0.3)  # time enough for a deletion that does not wait
        way.release.set()
        assert put.result() == 3 and delete.result() is True
    assert dict(blobs.list()) == {} == on_the_server(s3, blobs) and blobs.used_bytes() == 0


def test_quarantine_lies_under_its_own_prefix(s3: S3, blobs: RemoteBlobs) -> None:
    blobs.quarantine("ab12", "Check sum!")
    keys = [key for key, _ in blobs._endpoint.list()]
    assert len(keys) == 1 and keys[0].startswith("quarantine/") and keys[0].endswith("-ab12.check_sum_")


def test_a_dead_endpoint_fails_in_seconds_with_plain_words(s3: S3) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    start = time.monotonic()
    with pytest.raises(StorageError, match=r"cannot be opened: the endpoint cannot be reached after \d retries"):
        RemoteBlobs(s3.url(), config=s3.config(port))
    assert time.monotonic() - start < 8


def test_a_silent_endpoint_fails_in_seconds_and_then_at_once(
    s3: S3, way: FaultyWay, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = RemoteBlobs(s3.url(), config=s3.config(way.port), timeout_seconds=0.5, put_timeout_seconds=0.5)
    blobs.put_many([(f"ab{n}", [b"x"]) for n in range(20)])
    monkeypatch.setattr(endpoint, "_PAUSE_SECONDS", 3.0)
    way.rule = lambda method, key: "hang"
    start = time.monotonic()
    for n in range(20):
        with pytest.raises(ChunkFault, match="does not answer in time"):
            blobs.get(f"ab{n}")
    with pytest.raises(StorageError, match="does not answer in time"):
        blobs.put("cd", [b"y"])
    assert time.monotonic() - start < 8
    assert blobs.used_bytes() == 21  # the put never left, but its deletion could not be asked for
    way.heal()
    monkeypatch.setattr(endpoint.time, "monotonic", lambda now=time.monotonic: now() + 3)
    assert bytes(blobs.get("ab3")) == b"x"


def test_wrong_names_are_told_apart(s3: S3) -> None:
    with pytest.raises(StorageError, match="no bucket or container of this name"):
        RemoteBlobs("s3://no-such-bucket/x", config=s3.config())
    with pytest.raises(StorageError, match="host name does not resolve"):
        RemoteBlobs(s3.url(), config={**s3.config(), "endpoint": "http://no-such-host.invalid"})
    with pytest.raises(StorageError, match="AWS_ALLOW_HTTP=true"):
        RemoteBlobs(s3.url(), config={**s3.config(), "allow_http": False})
    for url in ("ftp://host/x", "/a/folder", "https://example.invalid/x", "s3:"):
        with pytest.raises((InvalidRequest, StorageError)):
            RemoteBlobs(url)


@pytest.mark.full
def test_no_secret_is_in_any_error(s3: S3, way: FaultyWay, blobs: RemoteBlobs) -> None:
    """Nor in what a logger prints of it: causes and contexts included, suppressed ones too."""

    def chain(error: BaseException | None) -> str:
        return "" if error is None else f"{error!r}{error.__dict__}" + chain(error.__cause__) + chain(error.__context__)

    troubles: list[Callable[[], object]] = [
        lambda: RemoteBlobs(f"s3://{ACCESS_KEY}:{SECRET_KEY}@bucket/x"),
        lambda: RemoteBlobs(f"az://container/x?sig={SECRET_KEY}"),
        lambda: RemoteBlobs("s3://no-such-bucket/x", config=s3.config()),
        lambda: RemoteBlobs(s3.url(), config={**s3.config(), "nonsense": SECRET_KEY}),
        lambda: blobs.get("ab12"),
        lambda: blobs.put("cd34", [b"x"]),
        lambda: blobs.delete("ab12"),
    ]
    for outcome in ("503", "reset"):
        way.rule = lambda method, key, outcome=outcome: outcome
        for trouble in troubles:
            with pytest.raises(AgentKVError) as caught:
                trouble()
            told = "".join(traceback.format_exception(caught.value)) + chain(caught.value)
            for secret in (ACCESS_KEY, SECRET_KEY, "Signature", "authorization"):
                assert secret not in told


def test_denied_access_is_a_full_disk_for_writers() -> None:
    with s3_server(INITIAL_NO_AUTH_ACTION_COUNT="2") as server:
        blobs = RemoteBlobs(server.url(), config=server.config())  # the second request; keys are checked from here on
        with pytest.raises(StorageFull, match=r"access is refused \(403"):
            blobs.put("ab12", [b"x"])
        assert dict(blobs.list()) == {}
        with pytest.raises(StorageError, match=r"access is refused \(403") as caught:
            RemoteBlobs(blobs.url, config=server.config())
        assert ACCESS_KEY not in str(caught.value)


@pytest.mark.parametrize(
    ("package", "call", "words"),
    [
        ("obstore", "url='s3://bucket/x'", "s3://bucket/x needs obstore: pip install 'agentkv[remote]'"),
        ("cryptography", "url=None, key=bytes(32)", "it needs cryptography: pip install 'agentkv[encryption]'"),
    ],
)
def test_without_the_extra_the_error_names_it(package: str, call: str, words: str, tmp_path: Path) -> None:
    """In an interpreter that cannot import the package, and needs it for nothing else."""
    program = f"""
import sys
sys.modules[{package!r}] = None
from pathlib import Path
from agentkv.errors import Unsupported
from agentkv.storage.opening import open_blobs
open_blobs(url=None, root=Path({str(tmp_path)!r})).put("ab12", [b"x"])
open_blobs(url="memory:", root=Path())
try:
    open_blobs({call}, root=Path({str(tmp_path / "other")!r}))
except Unsupported as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert words in ran.stdout


def test_a_configuration_opens_the_store_it_names(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = bytes(32)
    assert isinstance(open_blobs(url=None, root=tmp_path / "a"), LocalBlobs)
    folder = open_blobs(url=f"file://{tmp_path}/b%20c", root=tmp_path / "a")
    assert isinstance(folder, LocalBlobs) and folder.root == tmp_path / "b c"
    assert isinstance(open_blobs(url="memory:", root=tmp_path, budget_bytes=5), MemoryBlobs)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    url = s3.url()
    sealed = open_blobs(url=url, root=tmp_path, budget_bytes=1000, key=key)
    assert isinstance(sealed, EncryptedBlobs) and isinstance(sealed.inner, RemoteBlobs)
    sealed.put("ab12", [b"private"])
    with pytest.raises(StorageFull, match="budget of 1,000"):
        sealed.put("ab34", [bytes(900)])
    with pytest.raises(StorageError, match="AGENTKV_ENCRYPTION_KEY"):
        open_blobs(url=url, root=tmp_path)
    assert bytes(open_blobs(url=url, root=tmp_path, key=key).get("ab12")) == b"private"
    parent, _, prefix = url.rpartition("/")
    assert f"{prefix}/ab12" in dict(RemoteBlobs(parent)._endpoint.list())
