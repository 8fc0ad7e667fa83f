"""A file of several things: all of it or nothing is written, and whatever is wrong with it is found and named."""

from __future__ import annotations

import errno
import os
import stat
import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from agentkv.errors import ImportRefused, InvalidRequest, StorageError, StorageFull
from agentkv.storage import container
from agentkv.storage.container import HEADER_LIMIT, Container, Section, section_of, write_container

HEADER = b'{"what": "a test"}'
CONTENTS = (b"first", b"", os.urandom(300), b"last")
SECTIONS = [section_of(content) for content in CONTENTS]


def go_on() -> None:
    pass


def written(path: Path, header: bytes = HEADER, contents: Sequence[bytes] = CONTENTS) -> Path:
    sections = [section_of(content) for content in contents]
    nbytes = write_container(path, header, sections, iter(contents), replace=True, go_on=go_on)
    assert nbytes == path.stat().st_size
    return path


def read(path: Path, sections: Sequence[Section] = SECTIONS) -> list[bytes]:
    with Container(path) as file:
        file.check(sections, go_on)
        return [file.header, *(file.content(number) for number in range(len(sections)))]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return written(tmp_path_factory.mktemp("container") / "file").read_bytes()


@given(st.binary(max_size=300), st.lists(st.binary(max_size=3000), max_size=6))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, header: bytes, contents: list[bytes]
) -> None:
    path = written(tmp_path_factory.getbasetemp() / "some", header, contents)
    assert read(path, [section_of(content) for content in contents]) == [header, *contents]


def test_it_is_its_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = written(tmp_path / "file")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_every_flipped_bit_and_every_cut_is_found(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "file"
    reasons = set()
    for at in range(len(whole)):
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises(ImportRefused) as refused:
                read(path)
            assert refused.value.path == str(path)
            reasons.add(refused.value.reason)
    assert reasons == {"truncated", "checksum", "format", "version"}
    path.write_bytes(whole + b"\0")
    with pytest.raises(ImportRefused, match="format"):
        read(path)
    path.write_bytes(whole)
    assert read(path)[1:] == list(CONTENTS), "the control"


def test_a_header_that_is_wrong_about_a_section_is_found(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(whole)
    with pytest.raises(ImportRefused, match=r"section 2 \(300 bytes\) is not what was written"):
        read(path, [*SECTIONS[:2], Section(nbytes=300, digest="0" * 64), SECTIONS[3]])


def resealed(prefix: bytes, header: bytes, rest: bytes) -> bytes:
    head = prefix + blake3(prefix + header).digest() + header
    return head + rest + blake3(head + rest).digest()


@pytest.mark.parametrize("claimed", [HEADER_LIMIT, HEADER_LIMIT + 1, 2**32 - 1])
def test_a_header_that_claims_to_be_huge_costs_nothing(tmp_path: Path, whole: bytes, claimed: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(resealed(whole[:12] + struct.pack("<I", claimed), HEADER, b""))
    refused_within(path, [], 2**20)


@pytest.mark.parametrize("nbytes", [10_000, 2**31, 2**52])
def test_sections_that_claim_to_be_huge_cost_nothing(tmp_path: Path, whole: bytes, nbytes: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(whole)
    refused_within(path, [*SECTIONS[:-1], Section(nbytes=nbytes, digest=SECTIONS[-1].digest)], 2**20)


def test_a_large_file_is_checked_in_pieces(tmp_path: Path) -> None:
    path, nbytes = tmp_path / "file", 2**26
    written(path)
    with path.open("r+b") as file:
        file.truncate(nbytes)  # sparse: all of it is there, as zeros
    with Container(path) as opened:
        rest = nbytes - len(opened._head) - 32
    refused_within(path, [Section(nbytes=rest, digest="0" * 64)], 2**23)


@pytest.mark.parametrize("filling", [b"[", b",", b"{"])
def test_a_header_of_millions_of_values_is_not_parsed(tmp_path: Path, whole: bytes, filling: bytes) -> None:
    path, header = tmp_path / "file", filling * (2**20 + 1)
    path.write_bytes(resealed(whole[:12] + struct.pack("<I", len(header)), header, b""))
    with pytest.raises(ImportRefused, match="values"):
        read(path)


def refused_within(path: Path, sections: Sequence[Section], limit: int) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ImportRefused):
            read(path, sections)
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder", "missing", "missing/too", "no\0name"):
        with pytest.raises(ImportRefused) as refused:
            Container(tmp_path / name)
        assert refused.value.reason == "unreadable"


def test_a_section_that_changes_between_two_reads_is_found(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(whole)
    with Container(path) as file:
        file.check(SECTIONS, go_on)
        altered = bytearray(whole)
        altered[-33] ^= 1
        path.write_bytes(altered)
        assert file.content(2) == CONTENTS[2]
        with pytest.raises(ImportRefused, match="changed while it was read"):
            file.content(3)


# -- writing -----------------------------------------------------------------------------------------------------------


def test_a_file_that_is_there_gives_way_only_where_it_may(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("precious")
    with pytest.raises(InvalidRequest, match="replace=True"):
        write_container(path, HEADER, SECTIONS, iter(CONTENTS), replace=False, go_on=go_on)
    assert path.read_text() == "precious"
    assert read(written(path))[0] == HEADER
    for place in (tmp_path, tmp_path / "no" / "folder", tmp_path / "no\0name"):
        with pytest.raises(InvalidRequest):
            write_container(place, HEADER, SECTIONS, iter(CONTENTS), replace=True, go_on=go_on)
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_a_file_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    path, asked = tmp_path / "file", 0

    def appear() -> None:
        nonlocal asked
        asked += 1
        if asked == 4:
            path.write_text("precious")

    with pytest.raises(InvalidRequest, match="exists already"):
        write_container(path, HEADER, SECTIONS, iter(CONTENTS), replace=False, go_on=appear)
    assert path.read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("call", range(7))
def test_whoever_stops_it_wherever_nothing_is_left(tmp_path: Path, call: int) -> None:
    path, calls = tmp_path / "file", 0
    path.write_text("before")

    def stop() -> None:
        nonlocal calls
        calls += 1
        if calls == call + 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_container(path, HEADER, SECTIONS, iter(CONTENTS), replace=True, go_on=stop)
    assert [found.name for found in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "before"


@pytest.mark.parametrize("after", [0, 1, 3, 5])
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    writes, real = 0, os.write

    def full(descriptor: int, content: memoryview) -> int:
        nonlocal writes
        writes += 1
        if writes > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, content)

    monkeypatch.setattr(container.os, "write", full)
    with pytest.raises(StorageFull, match="No space left"):
        write_container(tmp_path / "file", HEADER, SECTIONS, iter(CONTENTS), replace=False, go_on=go_on)
    assert list(tmp_path.iterdir()) == []


def test_content_that_is_not_what_its_header_says_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="changed while it was exported"):
        write_container(tmp_path / "file", HEADER, SECTIONS, iter((*CONTENTS[:3], b"tsal")), replace=False, go_on=go_on)
    assert list(tmp_path.iterdir()) == []
