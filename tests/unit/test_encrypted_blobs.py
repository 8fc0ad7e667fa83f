"""Encryption at rest: nothing readable, nothing altered unnoticed, no key guessed or shown."""

from __future__ import annotations

import base64
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from agentkv.errors import ChunkFault, InvalidRequest, WrongKey
from agentkv.storage.blobs import Scratch
from agentkv.storage.encrypted import KEY_CHECK, EncryptedBlobs, check_plain
from agentkv.storage.keys import key_from_environment, load_key
from agentkv.storage.local import LocalBlobs
from agentkv.storage.memory import MemoryBlobs
from agentkv.storage.sealing import HEADER, SEGMENT, plain_nbytes, sealed_nbytes

KEY = bytes(range(32))
OTHER = bytes(range(1, 33))
CONTENT = random.Random(0).randbytes(2 * SEGMENT + 1000)
STEP = SEGMENT + 16


def stored(inner: MemoryBlobs, name: str) -> bytearray:
    return bytearray(inner.get(name))


def reason(read: Callable[[], object]) -> str:
    with pytest.raises(ChunkFault) as caught:
        read()
    return caught.value.reason


@pytest.fixture
def inner() -> MemoryBlobs:
    return MemoryBlobs()


@pytest.fixture
def store(inner: MemoryBlobs) -> EncryptedBlobs:
    store = EncryptedBlobs(inner, KEY)
    store.put("ab12", [CONTENT])
    return store


def test_nothing_readable_lies_in_the_folder(tmp_path: Path) -> None:
    store = EncryptedBlobs(LocalBlobs(tmp_path), KEY)
    secret = b"the patient's name is Ada " * 40
    store.put_many([("ab12", [secret, CONTENT]), ("cd34", [secret])])
    store.quarantine("cd34", "checksum")
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 3
    for held in files:
        assert secret[:16] not in held and CONTENT[:16] not in held and KEY[:16] not in held


def test_the_format_is_what_its_description_says(inner: MemoryBlobs, store: EncryptedBlobs) -> None:
    """Opened by hand, from the module's description alone."""
    held = bytes(stored(inner, "ab12"))
    assert held[:8] == b"AKVSEAL\x01" and len(held) == sealed_nbytes(len(CONTENT)) == 40 + len(CONTENT) + 3 * 16
    derived = HKDF(SHA256(), 39, salt=held[8:40], info=b"agentkv blob\0ab12").derive(KEY)
    cipher, plain = AESGCM(derived[:32]), b""
    for number in range(3):
        nonce = derived[32:] + number.to_bytes(4, "big") + bytes([number == 2])
        plain += cipher.decrypt(nonce, held[40 + number * STEP : 40 + (number + 1) * STEP], held[:40])
    assert plain == CONTENT


def test_the_same_content_is_never_sealed_the_same_way(inner: MemoryBlobs, store: EncryptedBlobs) -> None:
    first = stored(inner, "ab12")
    store.put("ab12", [CONTENT])
    assert stored(inner, "ab12")[8:] != first[8:]


@given(n=st.integers(0, 5 * SEGMENT))
def test_plain_and_sealed_lengths_are_each_others_inverse(n: int) -> None:
    assert plain_nbytes(sealed_nbytes(n)) == n


@pytest.mark.parametrize("at", [0, 7, 8, 39, 40, 41, HEADER + STEP - 1, HEADER + STEP, HEADER + 2 * STEP + 3, -1])
def test_any_flipped_bit_is_found(inner: MemoryBlobs, store: EncryptedBlobs, at: int) -> None:
    held = stored(inner, "ab12")
    held[at] ^= 1
    inner.put("ab12", [held])
    expected = "format" if 0 <= at < 8 else "checksum"
    assert reason(lambda: store.get("ab12")) == expected
    assert reason(lambda: store.read_into("ab12", Scratch())) == expected


@pytest.mark.parametrize(
    "keep",
    [
        0,
        4,
        8,
        39,
        55,
        56,
        100,
        HEADER + STEP - 1,
        HEADER + STEP,
        HEADER + STEP + 1,
        HEADER + STEP + 16,
        HEADER + 2 * STEP,
        -1,
    ],
)
def test_any_cut_is_found(inner: MemoryBlobs, store: EncryptedBlobs, keep: int) -> None:
    inner.put("ab12", [stored(inner, "ab12")[:keep]])
    assert reason(lambda: store.get("ab12")) in ("truncated", "checksum")
    assert store.size("ab12") >= 0


def test_what_was_added_reordered_or_moved_is_found(inner: MemoryBlobs, store: EncryptedBlobs) -> None:
    store.put("cd34", [CONTENT[::-1]])
    held, other = stored(inner, "ab12"), stored(inner, "cd34")
    a, b = slice(HEADER, HEADER + STEP), slice(HEADER + STEP, HEADER + 2 * STEP)
    reordered, mixed = bytearray(held), bytearray(held)
    reordered[a], reordered[b] = held[b], held[a]
    mixed[b] = other[b]
    for forged in (reordered, mixed, other, held + b"x", held + bytes(STEP), held[: HEADER + STEP] + held[b.stop :]):
        inner.put("ab12", [forged])
        assert reason(lambda: store.get("ab12")) in ("checksum", "truncated")
    inner.put("ab34", [held])  # a whole blob under another name
    assert reason(lambda: store.get("ab34")) == "checksum"


def test_a_beginning_is_verified_without_the_rest(inner: MemoryBlobs, store: EncryptedBlobs) -> None:
    held = stored(inner, "ab12")
    held[HEADER + 2 * STEP] ^= 1
    inner.put("ab12", [held])
    assert bytes(store.get("ab12", limit=2 * SEGMENT)) == CONTENT[: 2 * SEGMENT]
    assert reason(lambda: store.get("ab12", limit=2 * SEGMENT + 1)) == "checksum"
    held[HEADER + 5] ^= 1
    inner.put("ab12", [held])
    assert reason(lambda: store.get("ab12", limit=1)) == "checksum"


def test_a_beginning_reads_only_its_segments(store: EncryptedBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []
    get = MemoryBlobs.get
    monkeypatch.setattr(
        MemoryBlobs, "get", lambda self, name, *, limit=None: (limits.append(limit), get(self, name, limit=limit))[1]
    )
    store.get("ab12", limit=100)
    store.get("ab12", limit=SEGMENT + 1)
    assert limits == [HEADER + STEP + 1, HEADER + 2 * STEP + 1]


@pytest.mark.parametrize("cut", [HEADER + STEP, HEADER + 2 * STEP])
def test_a_blob_cut_where_a_segment_ends_is_no_shorter_blob(
    inner: MemoryBlobs, store: EncryptedBlobs, cut: int
) -> None:
    inner.put("ab12", [stored(inner, "ab12")[:cut]])
    assert reason(lambda: store.get("ab12")) == "checksum"
    assert reason(lambda: store.get("ab12", limit=plain_nbytes(cut))) == "checksum"


def test_another_key_is_a_clear_error_at_open(inner: MemoryBlobs, store: EncryptedBlobs) -> None:
    before = dict(inner.list())
    with pytest.raises(
        WrongKey, match=r"another encryption key: set AGENTKV_ENCRYPTION_KEY or AGENTKV_ENCRYPTION_KEY_FI"
    ):
        EncryptedBlobs(inner, OTHER)
    assert dict(inner.list()) == before
    assert bytes(EncryptedBlobs(inner, KEY).get("ab12")) == CONTENT


def test_encrypted_without_a_key_and_plain_with_one_are_clear_errors(inner: MemoryBlobs, store: EncryptedBlobs) -> None:
    with pytest.raises(WrongKey, match="is encrypted, and no key was given"):
        check_plain(inner)
    plain = MemoryBlobs()
    check_plain(plain)
    plain.put("ab12", [b"AGENTKV\x1a and so on"])
    check_plain(plain)
    with pytest.raises(WrongKey, match="is not encrypted, and an encryption key was given"):
        EncryptedBlobs(plain, KEY)
    assert dict(plain.list()) == {"ab12": 18}


@pytest.mark.parametrize("damage", ["missing", "flipped", "cut"])
def test_a_lost_key_check_is_made_again_by_who_has_the_key(
    inner: MemoryBlobs, store: EncryptedBlobs, damage: str
) -> None:
    held = stored(inner, KEY_CHECK)
    held[50] ^= 1
    inner.delete(KEY_CHECK)
    if damage != "missing":
        inner.put(KEY_CHECK, [held if damage == "flipped" else held[:20]])
    with pytest.raises(WrongKey, match="no key was given"):
        check_plain(inner)
    with pytest.raises(WrongKey, match="another encryption key"):
        EncryptedBlobs(inner, OTHER)
    assert bytes(EncryptedBlobs(inner, KEY).get("ab12")) == CONTENT
    with pytest.raises(WrongKey):
        EncryptedBlobs(inner, OTHER)


def test_the_key_check_is_no_blob(inner: MemoryBlobs, store: EncryptedBlobs) -> None:
    assert not store.exists(KEY_CHECK) and not store.delete(KEY_CHECK) and not store.quarantine(KEY_CHECK, "x")
    for read in (store.get, store.size, lambda name: store.read_into(name, Scratch())):
        assert reason(lambda read=read: read(KEY_CHECK)) == "missing"
    with pytest.raises(ValueError, match="key's check"):
        store.put(KEY_CHECK, [b"x"])
    assert dict(store.list()) == {"ab12": len(CONTENT)} and inner.exists(KEY_CHECK)
    assert store.used_bytes() == inner.used_bytes() == sealed_nbytes(len(CONTENT)) + inner.size(KEY_CHECK)


@pytest.mark.parametrize(
    "write",
    [
        bytes.hex,
        lambda k: k.hex().upper() + "\n",
        lambda k: base64.b64encode(k).decode(),
        lambda k: base64.urlsafe_b64encode(k).decode().rstrip("="),
    ],
    ids=["hex", "HEX and newline", "base64", "base64url unpadded"],
)
def test_a_key_is_hex_or_base64_from_text_or_file(write: Callable[[bytes], str], tmp_path: Path) -> None:
    key = bytes(range(224, 256))
    assert load_key(write(key)) == key
    file = tmp_path / "key"
    file.write_text(write(key))
    file.chmod(0o600)
    assert load_key(file) == key
    assert key_from_environment({"AGENTKV_ENCRYPTION_KEY": write(key)}) == key
    assert key_from_environment({"AGENTKV_ENCRYPTION_KEY_FILE": str(file)}) == key
    assert key_from_environment({}) is None


@pytest.mark.parametrize(
    "text", ["", "hunter2hunter2", "ab" * 31, "ab" * 33, "!" * 44, base64.b64encode(bytes(31)).decode()]
)
def test_what_is_no_key_is_refused_and_not_shown(text: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    file.chmod(0o600)
    for source in (text, file):
        with pytest.raises(InvalidRequest, match="holds no key: expected 32 bytes") as caught:
            load_key(source)
        assert not text or text not in str(caught.value)
        assert caught.value.param == "encryption_key"


def test_a_key_file_is_its_owners_only(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY.hex())
    for mode in (0o640, 0o604, 0o660):
        file.chmod(mode)
        with pytest.raises(InvalidRequest, match=r"chmod 600"):
            load_key(file)
    with pytest.raises(InvalidRequest, match="No such file"):
        load_key(tmp_path / "none")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        load_key(tmp_path)
    with pytest.raises(InvalidRequest, match="both set"):
        key_from_environment({"AGENTKV_ENCRYPTION_KEY": KEY.hex(), "AGENTKV_ENCRYPTION_KEY_FILE": os.fspath(file)})
