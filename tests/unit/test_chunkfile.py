"""A chunk file is what was written, or a ``ChunkFault`` that says why not."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from blake3 import blake3

from agentkv.codecs import CODECS, Codecs, KVBlock
from agentkv.errors import ChunkFault
from agentkv.storage import naming
from agentkv.storage.chunkfile import (
    HEAD_LIMIT,
    ChunkHeader,
    ChunkMeta,
    EncodedChunk,
    Part,
    check,
    decode_part,
    encode_chunk,
    read_header,
)
from agentkv.storage.host import HostTier
from agentkv.types import KVGeometry, LayerGroup, Span, StateShape

FULL = LayerGroup((0, 2), None, 2, 32, 48)
SLIDING = LayerGroup((1,), 6, 1, 32, 32)
GEOMETRY = KVGeometry((FULL, SLIDING), "bfloat16")
LEDGER = np.arange(100, 140, dtype="<i4")
SPAN = Span(8, 20)
SALT = naming.tenant_salt(b"secret of this home", "default")


def kv(group: LayerGroup, tokens: int, dtype: torch.dtype = torch.bfloat16) -> KVBlock:
    """Numbers for one layer group."""
    random = torch.Generator().manual_seed(tokens)
    keys = (torch.randn(group.kv_heads, tokens, group.key_dim, generator=random).to(dtype) for _ in group.layers)
    values = (torch.randn(group.kv_heads, tokens, group.value_dim, generator=random).to(dtype) for _ in group.layers)
    return KVBlock(tuple(keys), tuple(values))


def empty(group: LayerGroup, tokens: int, dtype: torch.dtype = torch.bfloat16) -> KVBlock:
    """Room for one layer group, as views of larger buffers."""
    block = kv(group, tokens + 5, dtype)
    return KVBlock(
        *(tuple(torch.zeros_like(t)[:, 2 : 2 + tokens] for t in side) for side in (block.keys, block.values))
    )


def meta(span: Span = SPAN, **changes: object) -> ChunkMeta:
    """What the writer says, for a ledger of ``LEDGER``."""
    chain = naming.chain_hash(LEDGER[: span.stop])
    plain = ChunkMeta(
        kv_fingerprint="weights-1",
        tenant="digest-of-salt",
        lookup_key=naming.lookup_key(SALT, "weights-1", start=span.start, stop=span.stop, chain=chain),
        geometry=GEOMETRY,
        span=span,
        chain_start=naming.chain_hash(LEDGER[: span.start]),
        chain=chain,
        ids=LEDGER[span.start : span.stop].tobytes(),
        position_base=span.start,
        resume_points=(span.stop,),
    )
    return replace(plain, **changes)


def chunk(codec: str = "exact", **changes: object) -> EncodedChunk:
    """A small chunk: full attention over the span, the sliding group's last six tokens."""
    parts = [Part(0, SPAN, kv(FULL, len(SPAN))), Part(1, Span(14, 20), kv(SLIDING, 6))]
    return encode_chunk(meta(**changes), parts, CODECS.get(codec))


EXPECTED = {
    "kv_fingerprint": "weights-1",
    "geometry": GEOMETRY,
    "within": SPAN,
    "ids": LEDGER[8:20],
    "chain_start": naming.chain_hash(LEDGER[:8]),
    "chain": naming.chain_hash(LEDGER[:20]),
    "tenant": "digest-of-salt",
    "lineage": "",
}


def use(data: bytes, chunk_id: str, **changes: object) -> list[KVBlock]:
    """All that a restore does with a file."""
    header = read_header(data, chunk_id)
    check(header, **{**EXPECTED, **changes})  # type: ignore[arg-type]
    outs = []
    for i, part in enumerate(header.parts):
        outs.append(empty(GEOMETRY.groups[part.group], len(part.span)))
        decode_part(data, header, i, outs[-1], Codecs())
    return outs


def fault(data: bytes, chunk_id: str, **changes: object) -> str:
    """The reason why a restore refuses."""
    with pytest.raises(ChunkFault) as caught:
        use(data, chunk_id, **changes)
    assert caught.value.chunk_id == chunk_id
    return caught.value.reason


@pytest.mark.parametrize("codec", ["raw", "exact"])
def test_what_was_written_comes_back(codec: str) -> None:
    written = chunk(codec)
    data = written.tobytes()
    assert written.nbytes == len(data)
    assert read_header(data, written.id) == written.header
    full, sliding = use(data, written.id)
    for got, put in ((full, kv(FULL, 12)), (sliding, kv(SLIDING, 6))):
        for a, b in zip((*got.keys, *got.values), (*put.keys, *put.values), strict=True):
            assert torch.equal(a, b)


def test_the_header_describes_the_chunk() -> None:
    header = chunk(lineage="e:8", resume_points=(14, 20), ancestors=("exact",)).header
    assert (header.span, header.geometry, header.token_ids) == (SPAN, GEOMETRY, LEDGER[8:20].tobytes())
    assert (header.lineage, header.resume_points, header.ancestors) == ("e:8", (14, 20), ("exact",))
    assert [part.span for part in header.parts] == [SPAN, Span(14, 20)]
    assert header.parts_of(1) == (1,)


def test_a_sliding_group_may_be_absent_or_in_pieces() -> None:
    whole = Part(0, SPAN, kv(FULL, 12))
    alone = encode_chunk(meta(), [whole], CODECS.get("raw"))
    assert len(use(alone.tobytes(), alone.id)) == 1
    pieces = [whole, Part(1, Span(8, 10), kv(SLIDING, 2)), Part(1, Span(14, 20), kv(SLIDING, 6))]
    split = encode_chunk(meta(), pieces, CODECS.get("raw"))
    assert len(use(split.tobytes(), split.id)) == 3


def test_what_recurrent_layers_carry_is_part_of_the_geometry_and_absent_where_there_is_none() -> None:
    states = (StateShape("conv", 0, (7, 3), "bfloat16"), StateShape("recurrent", 0, (2, 5, 5), "float32"))
    group = LayerGroup.recurrent((1, 3), states, itemsize=2)
    geometry = KVGeometry((FULL, group), "bfloat16")
    parts = [Part(0, SPAN, kv(FULL, len(SPAN))), Part(1, Span(19, 20), kv(group, 1))]
    written = encode_chunk(meta(geometry=geometry), parts, CODECS.get("exact"))
    header = read_header(written.tobytes(), written.id)
    assert header.geometry == geometry
    assert b'"states"' not in chunk().tobytes()
    other = replace(group, states=(states[0]._replace(shape=(3, 7)), states[1]))
    for another in (GEOMETRY, replace(geometry, groups=(FULL, other)), replace(geometry, groups=(FULL,))):
        assert fault(written.tobytes(), written.id, geometry=another) == "geometry"


def test_every_flipped_byte_is_noticed() -> None:
    written = chunk()
    data = written.tobytes()
    reasons = {fault(data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1 :], written.id) for i in range(len(data))}
    assert reasons == {"format", "version", "checksum", "truncated"}


def test_every_truncation_is_noticed() -> None:
    written = chunk()
    data = written.tobytes()
    assert {fault(data[:n], written.id) for n in range(0, len(data), 7)} == {"truncated"}
    assert fault(data[:-1], written.id) == "truncated"
    assert fault(data + b"\0", written.id) == "format"


def test_a_whole_file_under_another_name_is_noticed() -> None:
    one, other = chunk("raw"), chunk("exact")
    assert one.id != other.id
    assert fault(one.tobytes(), other.id) == "checksum"


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("kv_fingerprint", "weights-2", "fingerprint"),
        ("tenant", "someone else", "fingerprint"),
        ("lineage", "e:8", "fingerprint"),
        ("lookup_key", "0" * 40, "fingerprint"),
        ("geometry", KVGeometry((FULL,), "bfloat16"), "geometry"),
        ("geometry", KVGeometry((FULL, SLIDING), "float16"), "geometry"),
        ("within", Span(8, 21), "tokens"),
        ("within", Span(7, 20), "tokens"),
        ("ids", LEDGER[9:21], "tokens"),
        ("ids", LEDGER[8:21], "tokens"),
        ("ids", LEDGER[8:8], "tokens"),
        ("chain", naming.chain_hash(LEDGER[1:20]), "tokens"),
        ("chain_start", naming.chain_hash(LEDGER[1:8]), "tokens"),
    ],
)
def test_a_foreign_chunk_is_refused(field: str, value: object, reason: str) -> None:
    written = chunk()
    assert fault(written.tobytes(), written.id, **{field: value}) == reason


def test_a_shortened_segment_is_tied_to_its_ledger_by_what_comes_before() -> None:
    written = chunk()
    fork = naming.chain_hash([*LEDGER[:12], 1, 2, 3, 4, 5, 6, 7, 8])
    use(written.tobytes(), written.id, ids=LEDGER[8:12], chain=fork)
    assert fault(written.tobytes(), written.id, ids=[*LEDGER[8:11], 7], chain=fork) == "tokens"


def test_the_head_of_a_file_is_enough_for_its_header() -> None:
    written = chunk()
    data = written.tobytes()
    head = data[: len(written.buffers[0])]
    assert len(head) <= HEAD_LIMIT
    assert read_header(head, written.id, nbytes=len(data)) == written.header
    with pytest.raises(ChunkFault, match="truncated"):
        read_header(head, written.id, nbytes=len(data) - 1)


def test_a_buffer_of_other_shape_or_dtype_is_refused() -> None:
    written = chunk()
    data = written.tobytes()
    for index, out in ((0, empty(FULL, 11)), (0, empty(SLIDING, 12)), (0, empty(FULL, 12, torch.float16)), (5, None)):
        with pytest.raises(ChunkFault) as caught:
            decode_part(data, written.header, index, out, Codecs())  # type: ignore[arg-type]
        assert caught.value.reason == "geometry"


def forge(written: EncodedChunk, **changes: object) -> tuple[bytes, str]:
    """A file whose checksums are right and whose header an attacker chose."""
    fields = {**json.loads(written.header.model_dump_json()), **changes}
    text = json.dumps({name: value for name, value in fields.items() if value is not ...}).encode()
    prefix = written.buffers[0][:12] + len(text).to_bytes(4, "little")
    digest = blake3(prefix + text).digest()
    key = fields["lookup_key"]
    return prefix + digest + text + b"".join(written.buffers[1:]), naming.chunk_id(key, digest)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 1},
        {"format": ...},
        {"surprise": 1},
        {"start": -1},
        {"stop": 8},
        {"stop": 2**60},
        {"ids": "AAAA"},
        {"ids": "!" * 64},
        {"parts": []},
        {"groups": []},
        {"dtype": "int8"},
        {"resume_points": [7]},
        {"resume_points": [20, 20]},
        {"chain": "short"},
        {"codec": 7},
        {"lookup_key": "../../etc"},
        {"position_base": "8"},
        {"position_base": float("nan")},
    ],
)
def test_a_forged_header_is_a_format_fault(changes: dict[str, object]) -> None:
    assert fault(*forge(chunk(), **changes)) == "format"


def test_forged_part_tables_are_format_faults() -> None:
    written = chunk()
    parts = json.loads(written.header.model_dump_json())["parts"]
    for which, change in (
        (0, {"offset": 1}),
        (1, {"offset": 0}),
        (0, {"start": 9}),
        (0, {"stop": 19}),
        (0, {"parameters": []}),
        (1, {"start": 20}),
        (1, {"stop": 21}),
        (1, {"group": 2}),
        (1, {"group": -1}),
        (0, {"digest": "x"}),
        (0, {"length": -5}),
    ):
        forged = [dict(part) for part in parts]
        forged[which].update(change)
        assert fault(*forge(written, parts=forged)) == "format", change
    assert fault(*forge(written, parts=parts[1:])) == "format"


def test_a_length_that_reaches_past_the_file_is_truncated() -> None:
    written = chunk()
    parts = json.loads(written.header.model_dump_json())["parts"]
    parts[1]["length"] = 2**40
    assert fault(*forge(written, parts=parts)) == "truncated"


def test_a_deeply_nested_header_is_a_fault() -> None:
    text = b'{"codec":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    prefix = chunk().buffers[0][:12] + len(text).to_bytes(4, "little")
    data = prefix + blake3(prefix + text).digest() + text
    assert fault(data, "0" * 40) == "format"


def test_an_unknown_codec_and_a_wrong_one_are_faults() -> None:
    written = chunk("raw")
    parts = json.loads(written.header.model_dump_json())["parts"]
    for change, reason in (
        ({"codec": "from-the-future"}, "version"),
        ({"codec": "exact"}, "decode"),
        ({"parameters": {"fit": "of another home"}}, "fit"),
    ):
        assert fault(*forge(written, parts=[{**part, **change} for part in parts])) == reason


def test_each_part_has_its_own_codec() -> None:
    first, rest = kv(FULL, 12).cut(0, 5), kv(FULL, 12).cut(5, 12)
    parts = [Part(0, Span(8, 13), first, CODECS.get("exact")), Part(0, Span(13, 20), rest)]
    written = encode_chunk(meta(), parts, CODECS.get("raw"))
    assert [part.codec for part in written.header.parts] == ["exact", "raw"]
    for got, put in zip(use(written.tobytes(), written.id), (first, rest), strict=True):
        for a, b in zip((*got.keys, *got.values), (*put.keys, *put.values), strict=True):
            assert torch.equal(a, b)
    with pytest.raises(ValueError, match="leave a gap"):
        encode_chunk(meta(), [parts[0], Part(0, Span(14, 20), kv(FULL, 6))], CODECS.get("raw"))


def test_parts_that_do_not_fit_the_meta_are_refused_at_once() -> None:
    whole = Part(0, SPAN, kv(FULL, 12))
    for parts in (
        [],
        [Part(0, SPAN, kv(FULL, 11))],
        [Part(0, Span(8, 19), kv(FULL, 11))],
        [whole, Part(1, Span(10, 21), kv(SLIDING, 11))],
        [whole, Part(1, Span(10, 16), kv(SLIDING, 6)), Part(1, Span(14, 20), kv(SLIDING, 6))],
        [Part(0, SPAN, kv(FULL, 12, torch.float16))],
    ):
        with pytest.raises(ValueError):
            encode_chunk(meta(), parts, CODECS.get("raw"))
    with pytest.raises(ValueError):
        encode_chunk(meta(ids=LEDGER[8:19].tobytes()), [whole], CODECS.get("raw"))


def test_ids_do_not_depend_on_the_process_and_change_with_everything() -> None:
    assert chunk().id == chunk().id
    others = {chunk("raw").id, chunk().id, chunk(position_base=0).id, chunk(tenant="t").id}
    assert len(others) == 4


def test_a_chain_hash_is_the_ledger_and_nothing_else() -> None:
    chain = naming.LedgerChain()
    assert chain.digest() == naming.chain_hash([])
    assert chain.extend(LEDGER[:8]).digest() == naming.chain_hash(LEDGER[:8].tobytes())
    fork = chain.copy()
    assert chain.extend([int(i) for i in LEDGER[8:]]).digest() == naming.chain_hash(LEDGER)
    assert (chain.tokens, fork.tokens) == (40, 8)
    assert fork.digest() == naming.chain_hash(LEDGER[:8]) != naming.chain_hash(LEDGER[:7])
    with pytest.raises(ValueError, match="int32"):
        naming.chain_hash([2**31])
    with pytest.raises(ValueError, match="whole number"):
        naming.chain_hash(b"abc")


def test_lookup_keys_are_salted_by_tenant_and_fields_do_not_run_together() -> None:
    def key(**changes: object) -> str:
        fields = {"salt": SALT, "kv_fingerprint": "f", "start": 1, "stop": 12, "chain": "c", "lineage": "", **changes}
        return naming.lookup_key(**fields)  # type: ignore[arg-type]

    keys = {
        key(),
        key(salt=naming.tenant_salt(b"secret of this home", "other")),
        key(salt=naming.tenant_salt(b"another secret", "default")),
        key(kv_fingerprint="g"),
        key(start=11, stop=2),
        key(chain="", lineage="c"),
    }
    assert len(keys) == 6
    assert all(len(k) == naming.NAME_DIGITS for k in keys)


def test_the_host_tier_counts_refuses_and_never_drops_what_is_pinned() -> None:
    tier = HostTier(100)
    assert tier.put("a", b"x" * 40) and tier.put("b", bytearray(50))
    assert not tier.put("c", b"x" * 11)
    assert tier.put("a", b"x" * 40)  # a second reference costs nothing
    assert (tier.used_bytes, tier.free_bytes, len(tier)) == (90, 10, 2)
    assert [name for name, _ in tier.lru()] == ["b", "a"]
    assert tier.get("b") == bytes(50) and [name for name, _ in tier.lru()] == ["a", "b"]
    with tier.pinned("b") as payload:
        assert payload == bytes(50)
        assert tier.lru() == [("a", 40)]
        assert tier.discard("b") == 0 and tier.used_bytes == 90
    assert "b" not in tier and tier.used_bytes == 40
    assert tier.release("a") == 0
    assert tier.release("a") == 40
    assert (tier.used_bytes, tier.get("a"), tier.pin("a"), tier.release("a")) == (0, None, None, 0)
    tier.check_integrity()


def test_the_host_tier_does_not_keep_a_slices_parent() -> None:
    parent = bytes(1000)
    tier = HostTier(100)
    assert tier.put("a", memoryview(parent)[:10])
    assert tier.get("a") == bytes(10) and type(tier.get("a")) is bytes
    assert tier.used_bytes == 10


def test_headers_are_values() -> None:
    header = chunk().header
    assert isinstance(header, ChunkHeader)
    with pytest.raises(ValueError, match="frozen"):
        header.codec = "raw"  # type: ignore[misc]
