"""Calibration on real models: what it measures, what it keeps, what it says on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import CONTEXT, chat_folder, model_folder

from agentkv.cli.checkup import examine
from agentkv.codecs import CODECS, KVBlock
from agentkv.codecs.raw import Raw
from agentkv.engine.calibration import Scorer, calibrate, divergence
from agentkv.engine.direct import prefill
from agentkv.engine.frozen import FrozenState
from agentkv.engine.loading import LoadedModel, load
from agentkv.engine.recall import NEEDLES, needle_chat, recalled
from agentkv.engine.texts import documentation, encoded, fitted_texts, scored_text
from agentkv.errors import EngineFailed, InvalidRequest
from agentkv.models import resolve
from agentkv.models.calibrations import load_calibration
from agentkv.settings import Settings

PREFIX, SCORED = 700, 60


def loaded(folder: Path) -> LoadedModel:
    settings = Settings(home=folder.parent / "home", device="cpu", dtype="float32", prefill_tokens=256)
    local = resolve(str(folder), settings)
    assert local is not None
    return load(local, settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return loaded(folder)


@pytest.fixture(scope="module")
def report(model: LoadedModel) -> Any:
    said: list[str] = []
    done = calibrate(model, prefix=PREFIX, scored=SCORED, say=said.append)
    assert any("compact+basis" in line for line in said)
    return done


def rows(report: Any) -> dict[str, Any]:
    return {row.codec: row for row in report.report.codecs}


# -- what is measured -------------------------------------------------------------------------------------------------


def test_exact_costs_nothing_and_lossy_codecs_something(report: Any) -> None:
    found = rows(report)
    assert set(found) >= {"exact", "int8", "int4", "compact", "compact+basis"}
    assert (found["exact"].mean_kl, found["exact"].p99_kl, found["exact"].top1) == (0.0, 0.0, 1.0)
    assert found["exact"].same_answers == 1.0
    assert 0 < found["int8"].mean_kl < found["int4"].mean_kl
    assert found["int4"].mean_kl < found["int4"].p99_kl
    for row in found.values():
        assert row.session_ratio > 1
        assert min(row.encode_mb_s, row.decode_mb_s, row.encode_mb_s_one_thread, row.decode_mb_s_one_thread) > 0


def test_the_report_says_what_was_fed_and_where(report: Any, model: LoadedModel) -> None:
    facts = report.report
    assert (facts.prefix_tokens, facts.scored_tokens, facts.needles) == (PREFIX, SCORED, len(NEEDLES))
    assert facts.lossy_tokens == 512 - 16, "two chunks without the sinks; the tail is lossless"
    assert facts.kv_fingerprint == model.fingerprints.kv
    assert facts.text.source == "shipped"
    assert facts.text.digest == scored_text().digest
    assert facts.fit_text.source.split(", ") == [text.source for text in fitted_texts()]
    assert facts.fit_text.tokens == 4 * CONTEXT
    assert {fit.digest for fit in report.fits} == {row.fit for row in facts.codecs if row.fit}


def test_the_ratio_counts_headers(model: LoadedModel) -> None:
    ids = encoded(scored_text(), model.tokenizer, PREFIX)
    kv = model.layout.open()
    prefill(model.adapter, model.layout, kv, ids, 256)
    state = FrozenState(model.layout, kv, model.fingerprints.kv)
    raw = state.encode(CODECS.get("raw"))
    assert sum(map(len, raw.payloads)) == state.lossy_nbytes
    assert 2 * 1000 < raw.nbytes - state.lossy_nbytes < 2 * 4000, "a header names 256 tokens"
    assert raw.session_nbytes > raw.nbytes
    assert state.nbytes == model.adapter.geometry.nbytes(PREFIX)


def test_a_restore_is_the_state_itself(model: LoadedModel) -> None:
    ids = encoded(scored_text(), model.tokenizer, PREFIX)
    kv = model.layout.open()
    prefill(model.adapter, model.layout, kv, ids, 256)
    state = FrozenState(model.layout, kv, model.fingerprints.kv)
    back = state.restore(state.encode(CODECS.get("exact")), 8).kv
    back.check_integrity()
    assert list(back.ids) == ids
    for group in range(len(model.adapter.geometry.groups)):
        for run in kv.visible(group):
            before, after = kv.read(group, run), back.read(group, run)
            pairs = zip((*before.keys, *before.values), (*after.keys, *after.values), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "glm", "smollm3", "gemma4", "qwen3_next"])
def test_sliding_and_recurrent_layers_stay_exact_and_every_rotation_is_understood(tmp_path: Path, name: str) -> None:
    tiny = loaded(model_folder(tmp_path, name))
    ids = [(7 * i * i + 3 * i + 1) % 131 for i in range(500)]
    scorer = Scorer(tiny, ids[:450], ids[450:])
    found = {codec: scorer.measure(codec, CODECS.get(codec)) for codec in ("exact", "int8", "int4")}
    kl = {codec: result.mean_kl for codec, result in found.items() if result}
    assert kl["exact"] == 0
    assert 0 < kl["int8"] < 0.02
    assert kl["int8"] < kl["int4"]
    live = scorer.measure_layout("quantized:int8")
    assert live is not None and 0 < live.mean_kl < 0.02


def test_the_divergence_is_that_of_float64() -> None:
    random = torch.Generator().manual_seed(5)
    reference = 3 * torch.randn(7, 50, generator=random)
    other = reference + 0.1 * torch.randn(7, 50, generator=random)
    reference[:, 3], other[:, 3] = -torch.inf, -torch.inf
    kl, same = divergence(reference.to(torch.bfloat16), other.to(torch.bfloat16))
    p, q = (t.to(torch.bfloat16).double().softmax(-1) for t in (reference, other))
    keep = [i for i in range(50) if i != 3]
    expected = (p[:, keep] * (p[:, keep] / q[:, keep]).log()).sum(-1)
    assert torch.allclose(kl, expected, rtol=1e-4, atol=1e-7)
    assert torch.equal(same, p.argmax(-1) == q.argmax(-1))
    assert divergence(reference, reference)[0].abs().max() == 0


# -- what it refuses --------------------------------------------------------------------------------------------------


class Liar(Raw):
    """Says that it is lossless."""

    name = "liar"

    def decode(self, payload: bytes | memoryview, out: KVBlock, parameters: Mapping[str, Any]) -> None:
        super().decode(payload, out, parameters)
        out.values[-1][0, 3] *= 1.5


class Broken(Raw):
    """Gives what is no number."""

    name = "broken"
    exact = False

    def decode(self, payload: bytes | memoryview, out: KVBlock, parameters: Mapping[str, Any]) -> None:
        out.keys[0].fill_(torch.nan)


def test_a_control_that_fails_ends_it(model: LoadedModel) -> None:
    ids = encoded(scored_text(), model.tokenizer, 500)
    with pytest.raises(EngineFailed, match="the control failed"):
        Scorer(model, ids[:450], ids[450:]).measure("liar", Liar())


def test_a_codec_that_gives_no_numbers_is_left_out(model: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    ids = encoded(scored_text(), model.tokenizer, 500)
    assert Scorer(model, ids[:450], ids[450:]).measure("broken", Broken()) is None
    assert "broken is left out" in caplog.text


def test_what_cannot_be_calibrated_is_refused_with_numbers(model: LoadedModel, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Too little. " * 20)
    with pytest.raises(InvalidRequest, match=r"short.txt\) has \d+ tokens, 760 are wanted"):
        calibrate(model, text=short, prefix=PREFIX, scored=SCORED)
    with pytest.raises(InvalidRequest, match="do not fit the model's context of 1,024"):
        calibrate(model, prefix=1000, scored=100)
    with pytest.raises(InvalidRequest, match="at least 384 tokens"):
        calibrate(model, prefix=300)
    with pytest.raises(InvalidRequest, match=r"cannot be read"):
        calibrate(model, text=tmp_path / "none.txt")
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        calibrate(loaded(model_folder(tmp_path)))
    with pytest.raises(InvalidRequest, match="every layer of this model has a sliding window"):
        calibrate(loaded(chat_folder(tmp_path, "mistral")), prefix=PREFIX)


# -- facts in a chat --------------------------------------------------------------------------------------------------


def test_facts_lie_where_codecs_reach_and_can_be_found(model: LoadedModel) -> None:
    chat = needle_chat(model.tokenizer, scored_text().content, 3000)
    assert chat is not None
    text = model.tokenizer.decode(chat.ids)
    assert all(needle.fact in text for needle in NEEDLES)
    last = max(text.index(needle.fact) for needle in NEEDLES)
    assert len(model.tokenizer.encode(text[last:], add_special_tokens=False)) > 384, "in the lossless tail"
    for needle, ids in zip(NEEDLES, chat.questions, strict=True):
        assert needle.question in model.tokenizer.decode(ids)
    right = [model.tokenizer.encode(f"It is {n.answer}.", add_special_tokens=False) for n in NEEDLES]
    assert recalled(model.tokenizer, right, frozenset()) == 1.0
    end = frozenset({model.tokenizer.eos_token_id})
    assert recalled(model.tokenizer, [[model.tokenizer.eos_token_id, *ids] for ids in right], end) == 0.0
    assert recalled(model.tokenizer, [right[0], *right[:-1]], end) == 1 / len(NEEDLES)


# -- texts ------------------------------------------------------------------------------------------------------------


def test_the_shipped_text_is_long_enough_and_nothing_is_said_twice(smollm2_path: Path) -> None:
    from transformers import AutoTokenizer

    text = scored_text().content
    ids = encoded(scored_text(), AutoTokenizer.from_pretrained(smollm2_path))
    assert len(ids) >= 7100
    windows = [tuple(ids[i : i + 40]) for i in range(len(ids) - 40)]
    assert len(set(windows)) == len(windows)
    fitted = "".join(it.content for it in fitted_texts())
    lines = [line for line in text.splitlines() if len(line) > 60]
    assert not [line for line in lines if line in fitted], "scored what a fit has seen"


def test_a_python_without_its_reference_has_docstrings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    documentation.cache_clear()
    try:
        fallback = documentation()
    finally:
        documentation.cache_clear()
    assert fallback.source.startswith("docstrings of Python")
    assert len(fallback.content) > 200_000
    assert "priority queue" in fallback.content


# -- the command line -------------------------------------------------------------------------------------------------


def agentkv(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "agentkv.cli.main", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=2000,
        env={**os.environ, "AGENTKV_DISK_MARGIN": "0"},
    )


def told(home: Path, folder: Path) -> dict[str, Any]:
    """What doctor says."""
    return examine(Settings(home=home, model=str(folder), device="cpu", disk_margin=0), fast=False)


@pytest.mark.full
def test_the_command_keeps_what_doctor_then_goes_by(tmp_path: Path, folder: Path) -> None:
    pytest.importorskip("matplotlib")
    home, picture = tmp_path / "home", tmp_path / "kl.png"
    before = told(home, folder)
    assert before["codec"]["auto_means"] == "int8"
    assert "never calibrated" in before["codec"]["because"]
    assert any("never calibrated" in note for note in before["notes"])
    options = ("--tokens", 600, "--score", 40, "--home", home, "--device", "cpu", "--max-kl", 0.05)
    done = agentkv("calibrate", folder, *options, "--json", "--plot", picture)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    wanted = {"codec", "ratio", "mean_kl", "p99_kl", "top1", "bytes_per_token", "encode_mb_s", "decode_mb_s"}
    assert {row["codec"] for row in result["codecs"]} >= {"exact", "int8", "int4", "compact", "compact+basis"}
    assert all(wanted <= row.keys() for row in result["codecs"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    inside = [row for row in result["codecs"] if row["mean_kl"] <= 0.05]
    strongest = max(inside, key=lambda row: row["ratio"])
    assert result["auto"] == strongest["encoder"]
    stored = load_calibration(home, result["kv_fingerprint"])
    assert stored.warnings == ()
    assert stored.report is not None
    after = told(home, folder)
    assert after["codec"]["calibrated"]
    assert "calibrated on 20" in after["codec"]["because"]
    Path(result["folder"], "report.json").write_text("{")
    damaged = told(home, folder)
    assert damaged["codec"]["auto_means"] == "int8"
    assert any("is damaged" in note for note in damaged["notes"])


def test_doctor_says_that_a_fragile_family_stays_exact(tmp_path: Path) -> None:
    report = told(tmp_path / "home", chat_folder(tmp_path, "qwen2"))
    assert report["codec"]["fragile_family"]
    assert any(
        note.startswith("idle_codec auto means exact: never calibrated, and qwen2 belongs to a fragile family")
        for note in report["notes"]
    )


def test_a_picture_without_its_folder_is_refused_before_anything_is_measured(tmp_path: Path, folder: Path) -> None:
    pytest.importorskip("matplotlib")
    done = agentkv("calibrate", folder, "--home", tmp_path / "home", "--plot", tmp_path / "none" / "kl.png")
    assert done.returncode == 1
    assert "its folder does not exist" in done.stderr
    assert not (tmp_path / "home").exists()


@pytest.mark.full
def test_context_of_the_tests_is_what_the_defaults_are_cut_to(model: LoadedModel) -> None:
    assert model.context_limit == CONTEXT
    done = calibrate(model)
    assert (done.report.prefix_tokens, done.report.scored_tokens) == (768, 256)


@pytest.mark.full
@pytest.mark.timeout(2100)  # eight passes over 7,000 tokens: minutes where bfloat16 is emulated
def test_acceptance_on_smollm2(smollm2_path: Path, tmp_path: Path) -> None:
    done = agentkv("calibrate", smollm2_path, "--home", tmp_path, "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(result["codecs"], indent=1))
    assert (result["prefix_tokens"], result["scored_tokens"]) == (6000, 1024)
    found = {row["codec"]: row for row in result["codecs"]}
    for codec, ratio, kl in (
        ("exact", 1.38, 0.0),
        ("int8", 1.85, 0.003),
        ("int4", 3.4, 0.006),
        ("compact", 4.0, 0.005),
        ("compact+basis", 5.0, 0.008),
    ):
        assert found[codec]["ratio"] >= ratio, codec
        assert found[codec]["mean_kl"] <= kl, codec
