"""A GGUF file becomes an ordinary checkpoint folder, once: bf16 safetensors, config, tokenizer, chat template.

transformers reads the GGUF; what it gets wrong or leaves out is put right here:

* without ``GgufConfig(dequantize=True)`` (5.24) the model keeps its quantiser and refuses to be saved;
* numbers stored as float32 come out with float32 noise (``rms_norm_eps`` 9.999999747378752e-06 for 1e-05);
* SmolLM's pre-tokenizer splits digits off first; transformers falls back to GPT-2's, which differs wherever white space
  precedes a digit. A byte-level pre-tokenizer it knows nothing of is refused: it would tokenise wrongly in silence;
* the tokenizer does not know the model's length, and carries notes about how it was loaded.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

from agentkv.errors import Unsupported

__all__ = ["convert_gguf", "convert_in_child"]

_GPT2_SPLIT = {"gpt-2", "gpt2", "default"}
_DIGITS_THEN_GPT2_SPLIT = {"smollm"}


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the checkpoint of ``gguf`` into ``folder``, which must exist; the model is held in memory meanwhile.

    ``Unsupported`` for a file whose tensors or tokenizer transformers cannot represent faithfully.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    split = _pre_tokenizer(gguf)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16, output_loading_info=True, **_dequantized()
    )
    model, info = loaded
    wrong = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
    if wrong:
        raise Unsupported(f"GGUF file {gguf.name}", f"its tensors do not fit the model class: {wrong}")
    for mark in ("hf_quantizer", "quantization_method"):
        model.__dict__.pop(mark, None)
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(str(folder))
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    if split in _DIGITS_THEN_GPT2_SPLIT:
        from tokenizers import pre_tokenizers

        backend = tokenizer.backend_tokenizer
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        )
    tokenizer.save_pretrained(str(folder))
    _edit(folder / "config.json", lambda config: _without_noise(_without(config, "_model_name_or_path")))
    limit = getattr(model.config, "max_position_embeddings", None)
    known_length = {"model_max_length": limit} if limit else {}
    _edit(
        folder / "tokenizer_config.json",
        lambda config: _without(config, "is_local", "local_files_only", "name_or_path") | known_length,
    )
    _check_weights(folder)


def convert_in_child(gguf: str, folder: str) -> None:
    """``convert_gguf`` as the target of a child process: an error is one line on standard error."""
    try:
        convert_gguf(Path(gguf), Path(folder))
    except Exception as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        sys.exit(f"{type(error).__name__}: {first}"[:500])


def _dequantized() -> dict[str, Any]:
    """The argument that asks for plain weights; older transformers give nothing else and lack it."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _pre_tokenizer(gguf: Path) -> str | None:
    """How the file's byte-level vocabulary splits text; ``None`` for other kinds of tokenizer."""
    metadata = _metadata(gguf)
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        return None
    name = str(metadata.get("tokenizer.ggml.pre", "default"))
    if name not in _GPT2_SPLIT | _DIGITS_THEN_GPT2_SPLIT | _splits_of_transformers():
        raise Unsupported(
            f"GGUF pre-tokenizer {name!r}", "transformers would split text differently; use the safetensors checkpoint"
        )
    return name


def _metadata(gguf: Path) -> dict[str, Any]:
    try:
        from transformers.integrations.gguf.reader import read_gguf_metadata
    except ImportError:
        # Seconds instead of milliseconds: this one reads the arrays of the vocabulary too.
        from gguf import GGUFReader

        wanted = ("tokenizer.ggml.model", "tokenizer.ggml.pre")
        return {key: field.contents() for key, field in GGUFReader(str(gguf)).fields.items() if key in wanted}
    return dict(read_gguf_metadata(str(gguf))[0])


def _splits_of_transformers() -> set[str]:
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:
        # Before 5.24 the pre-tokenizer follows the architecture; these are the families it was written for.
        return {"llama-bpe", "llama3", "qwen2", "tekken"}
    return set(GGUF_PRE_TOKENIZER_SPLITS)


def _edit(path: Path, change: Any) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text())), indent=2, ensure_ascii=False) + "\n")


def _without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def _without_noise(value: Any) -> Any:
    """Numbers that are exactly a float32 become the shortest decimal that means the same float32."""
    if isinstance(value, dict):
        return {key: _without_noise(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_noise(item) for item in value]
    if isinstance(value, float) and abs(value) < 3e38:
        import numpy

        single = numpy.float32(value)
        return float(str(single)) if float(single) == value else value
    return value


def _check_weights(folder: Path) -> None:
    """Every stored tensor is plain bf16, by the files' own headers (8-byte length, then JSON)."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        kinds = {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
        if kinds != {"BF16"}:
            raise Unsupported(f"GGUF file for {folder.name}", f"conversion left tensors of {sorted(kinds)}, not bf16")
