"""Real homes on tiny random models: folders that ``AgentKV.open`` loads, runtimes on them, what must hold there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from driving import prompt
from families import VOCAB, family
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentkv import AgentKV
from agentkv.schemas.replies import Reply
from agentkv.sessions.session import Session

__all__ = [
    "CONTEXT",
    "byte_tokenizer",
    "chat_folder",
    "check_home",
    "check_session",
    "model_folder",
    "opened",
    "prompt",
    "said",
    "turns",
    "written",
]

CONTEXT = 1024
_CHAT_VOCAB = 320
_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def model_folder(root: Path, name: str = "llama", seed: int = 0, *, vocab: int = VOCAB, label: str = "") -> Path:
    """A checkpoint of that family without a tokenizer, in float32, made once: the same seed, the same weights."""
    path = root / (label or f"{name}-{seed}")
    if not path.exists():
        member = family(name)
        config = member.config()
        config.vocab_size, config.max_position_embeddings = vocab, CONTEXT
        replace(member, config=lambda: config).build(seed).save_pretrained(path)
    return path


def chat_folder(root: Path, name: str = "llama", seed: int = 0, *, extra: str = "", label: str = "") -> Path:
    """As ``model_folder``, with a tiny byte-level tokenizer and a ChatML template. ``extra`` changes the tokenizer."""
    path = model_folder(root, name, seed, vocab=_CHAT_VOCAB, label=label or f"chat-{name}-{seed}{extra}")
    if not (path / "tokenizer.json").exists():
        byte_tokenizer(extra).save_pretrained(path)
    return path


@cache
def byte_tokenizer(extra: str = "") -> PreTrainedTokenizerFast:
    """A tiny byte-level tokenizer with a ChatML template."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_CHAT_VOCAB - 3, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    corpus = f"{extra}You are a helpful assistant. How is the weather in Paris? user system tool"
    raw.train_from_iterator([corpus], trainer)
    raw.add_special_tokens([AddedToken(t, normalized=False) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    built = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>")
    built.chat_template = _CHATML
    return built


def opened(home: Path, model: Path | str, **settings: Any) -> AgentKV:
    """A runtime to open: float32 on the CPU, bit for bit, nothing decided by time, no free space demanded."""
    quiet: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "idle_seconds": 3600.0,
        "disk_seconds": 3600.0,
        "disk_margin": 0,
        "max_tokens": 16,
        "prefill_tokens": 32,
        "idle_codec": "exact",
        "restore": "always",
    }
    return AgentKV.open(home=home, model=str(model), **{**quiet, **settings})


def turns(count: int, *, tokens: int = 40, seed: int = 0) -> list[list[int]]:
    """Inputs of ``count`` token-level turns."""
    return [prompt(tokens + i, seed + 1) for i in range(count)]


async def said(session: Session, inputs: Sequence[Sequence[int]], max_tokens: int = 6, **sampling: Any) -> list[Reply]:
    """The replies to some token-level turns."""
    return [await session.generate_tokens(ids, max_tokens=max_tokens, **sampling) for ids in inputs]


async def check_session(kv: AgentKV, session: Session) -> None:
    """One owner: items tile the ledger, KV is a prefix of it, tensors are consistent, the manifest lies inside."""
    core = session._core
    ledger = await session.token_ids()
    at = 0
    for item in await session.items():
        assert item.span.start == at, item
        at = item.span.stop
    assert at == len(ledger) == core.record.ledger_length
    assert core.ledger is None or list(core.ledger) == ledger
    if core.kv is not None:
        core.kv.check_integrity()
        assert list(core.kv.ids) == ledger[: core.kv.length]
        assert core.kv.length <= core.record.kv_length
    assert core.record.kv_length <= len(ledger)
    manifest = await kv.sessions.repository.manifest(session.id)
    assert manifest.length <= core.record.kv_length
    kv.sessions.tiers.host.check_integrity()


async def written(kv: AgentKV) -> None:
    """Wait until what was committed is written behind. A turn replies first; it holds the gate until it has begun."""
    for core in kv.sessions.cores():
        async with core.gate:
            if core.writing is not None:
                await asyncio.wait([core.writing])


async def check_home(kv: AgentKV) -> None:
    """Every live blob has a row and every stored segment a file; bytes are counted right; nothing is half-written."""
    await written(kv)
    blobs, repository = kv.sessions.tiers.blobs, kv.sessions.repository
    there = dict(blobs.list())
    known = await repository.known_chunk_ids()
    assert there.keys() <= known, "a live blob that SQL does not know"
    for record in await kv.sessions.list():
        for segment in (await repository.manifest(record.id)).segments:
            assert segment.chunk_id in there
    files = [path for path in kv.settings.blobs_dir.rglob("*") if path.is_file()]
    assert not [path for path in files if path.name.startswith(".tmp")]
    found = sum(path.stat().st_size for path in files)
    assert blobs.used_bytes() == found, (blobs.used_bytes(), found)
