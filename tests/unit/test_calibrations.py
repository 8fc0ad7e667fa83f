"""What a calibration leaves in the home, what damage to it costs, and which codec it lets through."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from agentkv.codecs import Fit, KVBlock
from agentkv.codecs.compact_fit import fit_compact
from agentkv.engine.fitting import coarser, steps_to_try
from agentkv.errors import StorageFull
from agentkv.models.calibrations import load_calibration, save_calibration
from agentkv.models.gate import (
    Calibration,
    CodecResult,
    LayoutResult,
    TextFacts,
    auto_codec,
    choose,
    current_fits,
    layout_trouble,
)

MODEL = "0123456789abcdef0123456789abcdef"


def block(tokens: int = 300, seed: int = 0) -> KVBlock:
    """KV whose channels are mixtures of a few directions, so that a basis has something to find."""
    random = torch.Generator().manual_seed(seed)

    def one() -> torch.Tensor:
        mixed = torch.randn(2, tokens, 4, generator=random) @ torch.randn(2, 4, 16, generator=random)
        return (mixed + 0.1 * torch.randn(2, tokens, 16, generator=random)).to(torch.bfloat16)

    return KVBlock((one(), one()), (one(), one()), layers=(0, 1))


def fit(seed: int = 0) -> Fit:
    return fit_compact([block(seed=seed)])


def result(codec: str, ratio: float, mean_kl: float, *, fitted: Fit | None = None) -> CodecResult:
    return CodecResult(
        codec=codec,
        encoder=codec.split("+")[0],
        fit=None if fitted is None else fitted.digest,
        ratio=ratio,
        session_ratio=ratio,
        mean_kl=mean_kl,
        p99_kl=10 * mean_kl,
        top1=1.0,
        bytes_per_token=100.0,
        session_bytes_per_token=120.0,
        encode_mb_s=500.0,
        decode_mb_s=900.0,
        encode_mb_s_one_thread=300.0,
        decode_mb_s_one_thread=500.0,
    )


EXACT, INT8, INT4 = result("exact", 1.4, 0.0), result("int8", 1.9, 0.001), result("int4", 3.5, 0.004)
COMPACT = result("compact", 4.2, 0.003)


def report(*codecs: CodecResult, **changes: Any) -> Calibration:
    facts: dict[str, Any] = {
        "agentkv": "1.0",
        "kv_fingerprint": MODEL,
        "model": "tiny",
        "model_type": "llama",
        "dtype": "bfloat16",
        "date": "2031-04-12T06:00:00+00:00",
        "machine": {"device": "cpu: one", "cores": 2},
        "text": TextFacts(source="shipped", digest="00", tokens=7024),
        "fit_text": None,
        "prefix_tokens": 6000,
        "scored_tokens": 1024,
        "lossy_tokens": 5600,
        "needles": 0,
        "max_kl": 0.005,
        "codecs": codecs,
    }
    return Calibration(**(facts | changes))


# -- the gate ---------------------------------------------------------------------------------------------------------


def test_the_strongest_inside_is_chosen_by_ratio() -> None:
    measured = report(EXACT, INT8, INT4, COMPACT, result("compact+basis", 6.0, 0.007))
    names = {max_kl: choose(measured, max_kl) for max_kl in (0.0, 0.001, 0.003, 0.004, 0.005, 0.007)}
    assert {max_kl: it.codec for max_kl, it in names.items() if it} == {
        0.0: "exact",
        0.001: "int8",
        0.003: "compact",
        0.004: "compact",
        0.005: "compact",
        0.007: "compact+basis",
    }
    assert choose(report(INT4), 0.001) is None


def test_a_codec_that_loses_planted_facts_is_not_chosen() -> None:
    """Mean KL over running text does not see what is looked up once."""
    exact, compact = (r.model_copy(update={"recall": 0.75}) for r in (EXACT, COMPACT))
    fitted = fit()
    basis = result("compact+basis", 9.0, 0.002, fitted=fitted)
    for recall, chosen in ((0.75, "compact+basis"), (0.625, "compact+basis"), (0.5, "compact")):
        measured = report(exact, compact, basis.model_copy(update={"recall": recall}), needles=8)
        best = choose(measured)
        assert best is not None
        assert best.codec == chosen
        assert current_fits(measured) == ({"compact": fitted.digest} if chosen == "compact+basis" else {})


def test_a_lossy_live_layout_is_held_to_the_same_gate() -> None:
    name = "quantized:int4"
    measured = LayoutResult(layout=name, ratio=3.0, mean_kl=0.01, p99_kl=0.1, top1=0.9)
    assert "never measured" in (layout_trouble(name, None) or "")
    assert "did not measure" in (layout_trouble(name, report(EXACT)) or "")
    assert "0.0100" in (layout_trouble(name, report(EXACT, layouts=(measured,))) or "")
    assert layout_trouble(name, report(EXACT, layouts=(measured,)), 0.02) is None


def test_auto_names_the_codec_of_the_registry_and_says_why() -> None:
    measured = report(EXACT, INT8, result("compact+basis", 6.0, 0.004, fitted=fit()))
    codec, why = auto_codec("llama", measured, 0.005)
    assert codec == "compact"
    assert "compact+basis" in why
    assert "6.00x" in why
    assert "2031-04-12" in why


def test_a_model_that_was_never_calibrated_uses_int8_and_a_fragile_one_exact() -> None:
    assert auto_codec("llama", None)[0] == "int8"
    for family in ("qwen2", "qwen2_moe", "qwen2_5_vl", "gpt_oss"):
        codec, why = auto_codec(family, None, model="mine")
        assert codec == "exact"
        assert "never calibrated" in why
        assert "fragile" in why
        assert "agentkv calibrate mine" in why
    assert auto_codec("qwen3", None)[0] == "int8"


def test_a_fragile_family_that_was_calibrated_goes_by_its_figures() -> None:
    assert auto_codec("qwen2", report(EXACT, INT8, INT4))[0] == "int4"


def test_where_nothing_is_inside_it_is_exact() -> None:
    assert auto_codec("llama", report(INT8, INT4), 0.0001)[0] == "exact"


def test_the_fit_to_encode_with_is_that_of_the_strongest_result_inside() -> None:
    fine, coarse = fit(0), fit(1)
    rows = (COMPACT, result("compact+a", 5.0, 0.004, fitted=fine), result("compact+b", 7.0, 0.02, fitted=coarse))
    assert current_fits(report(EXACT, *rows), 0.005) == {"compact": fine.digest}
    assert current_fits(report(EXACT, *rows), 0.05) == {"compact": coarse.digest}
    assert current_fits(report(EXACT, *rows), 0.003) == {}
    only = report(EXACT, *rows[1:])
    assert current_fits(only, 0.0001) == {"compact": fine.digest}, "the most faithful, where none is inside"


# -- the search for a step --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0.5, 1.0, 1.3, 2.0, 2.9, 3.9, 6.0, 8.0, 100.0])
def test_the_search_ends_within_a_quarter_of_an_octave_of_the_limit(limit: float) -> None:
    tried = list(steps_to_try(lambda step: step <= limit))
    assert len(tried) <= 6
    assert len(set(tried)) == len(tried)
    inside = [step for step in tried if step <= limit]
    if limit < 1:
        assert tried == [1.0]
    else:
        assert max(inside) > min(limit, 8) / 2**0.26


def test_a_coarser_fit_is_smaller_and_decodes_by_its_own_digest() -> None:
    from agentkv.codecs import CODECS, Codecs

    fine = fit()
    coarse = coarser(fine, 2.0)
    assert coarse.digest != fine.digest
    assert coarser(fine, 2.0).digest == coarse.digest
    codecs = Codecs([fine, coarse], {"compact": coarse.digest})
    encoder, kv = codecs.encoder("compact"), block()
    payload = encoder.encode(kv)
    assert len(payload) < 0.85 * len(CODECS.get("compact").fitted(fine).encode(kv))
    out = KVBlock(tuple(map(torch.zeros_like, kv.keys)), tuple(map(torch.zeros_like, kv.values)), layers=kv.layers)
    codecs.decoder("compact", encoder.parameters()).decode(payload, out, encoder.parameters())
    for before, after in zip((*kv.keys, *kv.values), (*out.keys, *out.values), strict=True):
        assert (before - after).float().square().mean() < 0.1 * before.float().square().mean()


# -- in the home ------------------------------------------------------------------------------------------------------


def test_what_was_saved_is_loaded_and_encodes_the_same_bytes(tmp_path: Path) -> None:
    fitted = fit()
    saved = report(EXACT, INT8, result("compact+basis", 6.0, 0.004, fitted=fitted))
    folder = save_calibration(tmp_path, saved, [fitted])
    assert folder == tmp_path / "calibration" / MODEL
    stored = load_calibration(tmp_path, MODEL)
    assert stored.report == saved
    assert stored.warnings == ()
    (loaded,) = stored.fits
    assert (loaded.codec, loaded.digest, loaded.facts) == (fitted.codec, fitted.digest, fitted.facts)
    assert all(torch.equal(loaded.tensors[name], t) for name, t in fitted.tensors.items())
    encoder = stored.codecs(0.005).encoder("compact")
    assert encoder.parameters() == {"fit": fitted.digest}
    from agentkv.codecs import CODECS

    assert encoder.encode(block()) == CODECS.get("compact").fitted(fitted).encode(block())
    assert stored.codecs(0.0001).encoder("compact").parameters() == {"fit": fitted.digest}


def test_files_are_their_owners_own(tmp_path: Path) -> None:
    folder = save_calibration(tmp_path / "home", report(EXACT), [fit()])
    for path in (folder, *folder.iterdir()):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_old_fits_stay_and_old_payloads_decode(tmp_path: Path) -> None:
    old, new = fit(0), fit(1)
    save_calibration(tmp_path, report(result("compact+basis", 6.0, 0.004, fitted=old)), [old])
    encoder = load_calibration(tmp_path, MODEL).codecs(0.005).encoder("compact")
    payload, kv = encoder.encode(block()), block()
    save_calibration(tmp_path, report(result("compact+basis", 6.0, 0.004, fitted=new)), [new])
    codecs = load_calibration(tmp_path, MODEL).codecs(0.005)
    assert codecs.encoder("compact").parameters() == {"fit": new.digest}
    out = KVBlock(tuple(map(torch.zeros_like, kv.keys)), tuple(map(torch.zeros_like, kv.values)), layers=kv.layers)
    codecs.decoder("compact", encoder.parameters()).decode(payload, out, encoder.parameters())
    assert out.keys[0].abs().sum() > 0


def test_a_home_without_any_says_nothing(tmp_path: Path) -> None:
    stored = load_calibration(tmp_path / "none", MODEL)
    assert (stored.report, stored.fits, stored.warnings) == (None, (), ())
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("", "damaged"),
        ("{", "damaged"),
        ("[1, 2]", "damaged"),
        ('{"format": 1}', "damaged"),
        (report(EXACT).model_dump_json()[:-40], "damaged"),
        (report(EXACT, kv_fingerprint="f" * 32).model_dump_json(), "another model"),
        (report(EXACT).model_dump_json().replace('"format":1', '"format":9'), "format"),
        (report(EXACT).model_dump_json().replace('"ratio":1.4', '"ratio":-1'), "ratio"),
    ],
)
def test_a_damaged_or_foreign_report_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str, word: str
) -> None:
    folder = save_calibration(tmp_path, report(EXACT, INT8))
    (folder / "report.json").write_text(content)
    stored = load_calibration(tmp_path, MODEL)
    assert stored.report is None
    (warning,) = stored.warnings
    assert word in warning
    assert str(folder / "report.json") in warning
    assert warning in caplog.text
    save_calibration(tmp_path, report(EXACT, INT8))
    assert load_calibration(tmp_path, MODEL).warnings == ()


def _flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 9)


def _emptied(path: Path) -> None:
    path.write_bytes(b"")


def _other(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(3)}, path)


def _renamed(path: Path) -> None:
    path.rename(path.with_name("0" * 32 + ".safetensors"))


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [_flipped, _cut, _emptied, _other, _renamed, _folder])
def test_a_damaged_fit_is_a_warning_and_its_result_does_not_count(tmp_path: Path, damage: Any) -> None:
    fitted = fit()
    folder = save_calibration(
        tmp_path, report(EXACT, INT8, result("compact+basis", 6.0, 0.004, fitted=fitted)), [fitted]
    )
    damage(folder / f"{fitted.digest}.safetensors")
    stored = load_calibration(tmp_path, MODEL)
    assert stored.fits == ()
    assert len(stored.warnings) == 2
    assert ".safetensors cannot be used" in stored.warnings[0]
    assert fitted.digest in stored.warnings[1]
    assert stored.report is not None
    assert [it.codec for it in stored.report.codecs] == ["exact", "int8"]
    assert auto_codec("llama", stored.report)[0] == "int8"
    assert stored.codecs(0.005).encoder("compact").parameters() == {}


def test_a_codec_that_is_not_installed_does_not_count(tmp_path: Path) -> None:
    save_calibration(tmp_path, report(EXACT, result("wonder", 90.0, 0.0)))
    stored = load_calibration(tmp_path, MODEL)
    assert auto_codec("llama", stored.report)[0] == "exact"
    assert "'wonder'" in stored.warnings[0]


def test_a_fit_of_a_codec_that_is_not_installed_is_a_warning(tmp_path: Path) -> None:
    save_calibration(tmp_path, report(EXACT), [Fit("wonder", "ab" * 16, {"x": torch.zeros(2)}, {})])
    stored = load_calibration(tmp_path, MODEL)
    assert stored.fits == ()
    assert "wonder" in stored.warnings[0]


def test_a_home_that_cannot_be_written_keeps_the_last_report(tmp_path: Path) -> None:
    folder = save_calibration(tmp_path, report(EXACT))
    before = (folder / "report.json").read_bytes()
    fitted = fit()
    (folder / f"{fitted.digest}.safetensors").mkdir()
    with pytest.raises(StorageFull, match="calibration"):
        save_calibration(tmp_path, report(EXACT, INT8), [fitted])
    assert (folder / "report.json").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == [f"{fitted.digest}.safetensors", "report.json"]
    shutil.rmtree(folder)
    folder.write_text("a file where the folder should be")
    with pytest.raises(StorageFull):
        save_calibration(tmp_path, report(EXACT))
    assert load_calibration(tmp_path, MODEL).report is None


def test_what_a_killed_calibration_left_is_swept_by_the_next(tmp_path: Path) -> None:
    folder = save_calibration(tmp_path, report(EXACT))
    old, young = folder / ".tmp-old", folder / ".tmp-young"
    for path in (old, young):
        path.write_text("half")
    os.utime(old, (0, 0))
    save_calibration(tmp_path, report(EXACT))
    assert not old.exists()
    assert young.exists(), "it may belong to a calibration that runs now"
    assert load_calibration(tmp_path, MODEL).warnings == ()


def test_a_report_is_json_that_other_programs_read(tmp_path: Path) -> None:
    folder = save_calibration(tmp_path, report(EXACT, COMPACT))
    plain = json.loads((folder / "report.json").read_text())
    assert plain["kv_fingerprint"] == MODEL
    assert [row["codec"] for row in plain["codecs"]] == ["exact", "compact"]
    assert plain["date"].startswith("2031")
