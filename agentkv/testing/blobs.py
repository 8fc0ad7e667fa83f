"""The conformance checks of blob stores: facts that any ``BlobStore``, whoever wrote it, must hold to.

    @pytest.mark.parametrize("check", BLOB_CHECKS, ids=lambda check: check.__name__)
    def test_my_store(check): check(Subject(make=MyStore))

A check raises ``AssertionError``. Each makes stores of its own, of a few tens of kilobytes.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from agentkv.errors import ChunkFault, StorageFull
from agentkv.storage.blobs import BlobStore, Scratch

__all__ = ["BLOB_CHECKS", "Subject"]

E = TypeVar("E", bound=Exception)

_ROOMY = 2**40


@dataclass(frozen=True, slots=True)
class Subject:
    """What the checks drive.

    ``make(budget_bytes)``: a new, empty store. ``at_rest(n)``: what ``used_bytes`` counts for a blob of ``n`` bytes.
    ``reopen(store)``: another store on the same bytes, as the next process finds them; ``None`` if they die with it.
    """

    make: Callable[[int], BlobStore]
    at_rest: Callable[[int], int] = lambda nbytes: nbytes
    reopen: Callable[[BlobStore], BlobStore] | None = None

    def empty(self) -> int:
        """``used_bytes`` of a store without a blob."""
        return self.make(_ROOMY).used_bytes()


def what_was_put_is_what_is_got(subject: Subject) -> None:
    store = subject.make(_ROOMY)
    before = store.used_bytes()
    assert store.put("ab12", [b"one", bytearray(b"two"), b"", memoryview(b"three")]) == 11
    assert bytes(store.get("ab12")) == b"onetwothree"
    assert store.exists("ab12") and store.size("ab12") == 11
    assert dict(store.list()) == {"ab12": 11}
    assert store.used_bytes() == before + subject.at_rest(11)


def lengths_of_any_kind_come_back(subject: Subject) -> None:
    store = subject.make(_ROOMY)
    rng = random.Random(0)
    for n in (0, 1, 15, 16, 17, 65_535, 65_536, 65_537, 262_143, 262_144, 262_145, 600_001):
        content = rng.randbytes(n)
        cut = n // 3
        assert store.put("ab12", [content[:cut], content[cut:]]) == n
        assert bytes(store.get("ab12")) == content and store.size("ab12") == n, f"{n:,} bytes"
    assert store.put("ab12", []) == 0 and bytes(store.get("ab12")) == b""


def a_limit_gives_the_first_bytes(subject: Subject) -> None:
    store = subject.make(_ROOMY)
    content = random.Random(1).randbytes(600_001)
    store.put_many([("ab12", [content]), ("cd34", [])])
    for limit in (0, 1, 100, 262_143, 262_144, 262_145, 524_288, 600_000, 600_001, 10_000_000):
        assert bytes(store.get("ab12", limit=limit)) == content[:limit], f"limit {limit:,}"
    assert bytes(store.get("cd34", limit=100)) == b""


def a_scratch_is_read_into_again_and_again(subject: Subject) -> None:
    store = subject.make(_ROOMY)
    contents = {f"ab{n:02}": random.Random(n).randbytes(n) for n in (0, 3, 5000, 90_000, 7)}
    store.put_many([(name, [content]) for name, content in contents.items()])
    scratch = Scratch()
    for name, content in contents.items():
        assert bytes(store.read_into(name, scratch)) == content
    with _raises(ChunkFault) as fault:
        store.read_into("none", scratch)
    assert fault[0].reason == "missing"


def a_blob_replaces_one_of_its_name(subject: Subject) -> None:
    store = subject.make(_ROOMY)
    before = store.used_bytes()
    store.put("ab12", [bytes(900)])
    store.put("ab12", [b"x" * 100])
    assert bytes(store.get("ab12")) == b"x" * 100 and store.size("ab12") == 100
    assert store.used_bytes() == before + subject.at_rest(100)


def a_group_is_put_whole(subject: Subject) -> None:
    store = subject.make(_ROOMY)
    assert store.put_many([("ab12", [b"1"]), ("ab34", [b"22"]), ("cd56", [b"333"])]) == 6
    assert dict(store.list()) == {"ab12": 1, "ab34": 2, "cd56": 3}
    assert store.put_many([]) == 0
    with _raises(ValueError):
        store.put_many([("ef12", [b"1"]), ("ef12", [b"2"])])
    with _raises(ValueError):
        store.put_many([("ef34", [b"1"]), ("no/name", [b"2"])])
    assert dict(store.list()) == {"ab12": 1, "ab34": 2, "cd56": 3}


def missing_is_a_fault_for_readers_and_no_matter_for_deleters(subject: Subject) -> None:
    store = subject.make(_ROOMY)
    for read in (store.get, store.size):
        with _raises(ChunkFault) as fault:
            read("ab12")
        assert (fault[0].reason, fault[0].chunk_id) == ("missing", "ab12")
    assert not store.exists("ab12") and not store.delete("ab12") and not store.quarantine("ab12", "checksum")


def delete_gives_the_bytes_back(subject: Subject) -> None:
    before = subject.empty()
    store = subject.make(before + subject.at_rest(16_000))
    store.put("ab12", [bytes(16_000)])
    assert store.delete("ab12") and store.used_bytes() == before and not store.exists("ab12")
    assert not store.delete("ab12") and dict(store.list()) == {}
    store.put("cd34", [bytes(16_000)])


def a_full_budget_refuses_with_numbers_and_leaves_nothing(subject: Subject) -> None:
    budget = subject.empty() + subject.at_rest(15_000) + subject.at_rest(1000)
    store = subject.make(budget)
    store.put("ab12", [bytes(15_000)])
    used = store.used_bytes()
    with _raises(StorageFull) as full:
        store.put_many([("cd34", [bytes(1000)]), ("ef56", [b"x"])])
    assert re.search(rf"[\d,]+ more bytes do not fit: {used:,} of a budget of {budget:,}", str(full[0])), full[0]
    assert dict(store.list()) == {"ab12": 15_000} and store.used_bytes() == used
    assert not store.exists("cd34") and not store.exists("ef56")
    store.put("cd34", [bytes(1000)])
    assert store.used_bytes() == budget


def only_plain_names_name_blobs(subject: Subject) -> None:
    store = subject.make(_ROOMY)
    for name in ("", "a", "../x", "ab/cd", "AB12", ".tmp-1", "a" * 200, "ab\n", "ab\0", "quarantine/ab12"):
        with _raises(ValueError):
            store.put(name, [b"x"])
        with _raises(ChunkFault):
            store.get(name)
        assert not store.exists(name)
        for change in (store.delete, partial(store.quarantine, reason="x")):
            try:
                assert not change(name)
            except ValueError:
                continue
    store.put("a" * 128, [b"x"])
    store.put("0_-", [b"y"])
    assert dict(store.list()) == {"a" * 128: 1, "0_-": 1}


def a_quarantined_blob_is_counted_and_not_served(subject: Subject) -> None:
    store = subject.make(_ROOMY)
    before, swept = store.used_bytes(), store.sweep()
    store.put("ab12", [bytes(600)])
    assert store.quarantine("ab12", "checksum") and not store.quarantine("ab12", "checksum")
    assert not store.exists("ab12") and dict(store.list()) == {}
    with _raises(ChunkFault) as fault:
        store.get("ab12")
    assert fault[0].reason == "missing"
    assert store.used_bytes() == before + subject.at_rest(600)
    report = store.sweep()
    assert (report.quarantined, report.quarantine_bytes) == (1, subject.at_rest(600))
    assert (report.blobs, report.blob_bytes) == (swept.blobs, swept.blob_bytes)
    store.put("ab12", [b"computed again"])
    assert bytes(store.get("ab12")) == b"computed again"


def quarantine_is_bounded_and_gives_way_to_new_blobs(subject: Subject) -> None:
    before, bad = subject.empty(), subject.at_rest(400)
    budget = 16 * (2 * bad + bad // 2)  # quarantine may hold a sixteenth: two of three
    store = subject.make(budget)
    for name in ("ab12", "cd34", "ef56"):
        store.put(name, [bytes(400)])
        store.quarantine(name, "checksum")
    assert store.used_bytes() == before + 2 * bad
    nbytes = budget - before - bad - bad // 2
    nbytes -= subject.at_rest(nbytes) - nbytes
    store.put("aa00", [bytes(nbytes)])  # fits beside one of them
    assert store.used_bytes() == before + subject.at_rest(nbytes) + bad
    store.delete("aa00")
    store.put("aa00", [bytes(budget // 16 + 1)])
    store.quarantine("aa00", "larger than all the room there is")
    assert store.used_bytes() <= before + budget // 16 and not store.exists("aa00")


def a_sweep_counts_and_touches_no_blob(subject: Subject) -> None:
    store = subject.make(_ROOMY)
    before = store.sweep()
    store.put_many([("ab12", [bytes(100)]), ("cd34", [bytes(50)])])
    report = store.sweep()
    assert (report.temporaries, report.temporary_bytes) == (0, 0)
    assert report.blobs == before.blobs + 2
    assert report.blob_bytes == before.blob_bytes + subject.at_rest(100) + subject.at_rest(50)
    assert dict(store.list()) == {"ab12": 100, "cd34": 50}


def many_writers_never_pass_the_budget_and_bytes_stay_exact(subject: Subject) -> None:
    before = subject.empty()
    budget = before + 8 * subject.at_rest(2000)
    store = subject.make(budget)
    barrier = threading.Barrier(4)

    def write(n: int) -> int:
        barrier.wait()
        full = 0
        for i in range(15):
            name = f"{i % 5:02x}{n}"
            try:
                store.put(name, [bytes(1993 + n), b"tail"])
            except StorageFull:
                full += 1
            assert store.used_bytes() <= budget
            if i % 3 == 0:
                store.delete(name)
        return full

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(write, range(4))) > 0
    assert store.used_bytes() == before + sum(subject.at_rest(nbytes) for _, nbytes in store.list())
    assert all(len(store.get(name)) == nbytes for name, nbytes in store.list())


def one_name_under_many_hands_is_whole_or_missing(subject: Subject) -> None:
    store = subject.make(_ROOMY)
    before = store.used_bytes()
    contents = [bytes([n]) * (3000 + n) for n in range(3)]
    barrier = threading.Barrier(4)

    def write(content: bytes) -> None:
        barrier.wait()
        for i in range(8):
            store.put("ab12", [content])
            if i % 4 == 3:
                store.delete("ab12")

    def read() -> None:
        barrier.wait()
        for _ in range(30):
            try:
                assert bytes(store.get("ab12")) in contents
            except ChunkFault as fault:
                assert fault.reason == "missing"

    with ThreadPoolExecutor(4) as pool:
        for done in [*(pool.submit(write, content) for content in contents), pool.submit(read)]:
            done.result()
    left = dict(store.list())
    assert store.used_bytes() == before + sum(map(subject.at_rest, left.values()))
    if left:
        assert bytes(store.get("ab12")) in contents
    assert store.delete("ab12") is bool(left) and store.used_bytes() == before


def the_next_process_finds_what_was_put(subject: Subject) -> None:
    if subject.reopen is None:
        return
    first = subject.make(_ROOMY)
    first.put_many([("ab12", [bytes(100)]), ("cd34", [b"kept"]), ("ef56", [bytes(7)]), ("ef78", [bytes(9)])])
    first.quarantine("ef56", "checksum")
    first.delete("ef78")
    again = subject.reopen(first)
    assert dict(again.list()) == {"ab12": 100, "cd34": 4} and bytes(again.get("cd34")) == b"kept"
    assert again.used_bytes() == first.used_bytes()
    assert again.sweep() == first.sweep()


BLOB_CHECKS: tuple[Callable[[Subject], None], ...] = (
    what_was_put_is_what_is_got,
    lengths_of_any_kind_come_back,
    a_limit_gives_the_first_bytes,
    a_scratch_is_read_into_again_and_again,
    a_blob_replaces_one_of_its_name,
    a_group_is_put_whole,
    missing_is_a_fault_for_readers_and_no_matter_for_deleters,
    delete_gives_the_bytes_back,
    a_full_budget_refuses_with_numbers_and_leaves_nothing,
    only_plain_names_name_blobs,
    a_quarantined_blob_is_counted_and_not_served,
    quarantine_is_bounded_and_gives_way_to_new_blobs,
    a_sweep_counts_and_touches_no_blob,
    many_writers_never_pass_the_budget_and_bytes_stay_exact,
    one_name_under_many_hands_is_whole_or_missing,
    the_next_process_finds_what_was_put,
)
"""Every check, in the order in which their failures say most."""


@contextmanager
def _raises(kind: type[E]) -> Iterator[list[E]]:
    """Catches an error of ``kind`` into the list it gives; ``AssertionError`` where none came."""
    caught: list[E] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    assert caught, f"{kind.__name__} was expected"
