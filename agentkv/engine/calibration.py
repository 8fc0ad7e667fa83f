"""Calibration: what each codec does to one model's next-token distributions, its bytes, and its time.

A text's first tokens are prefilled; that state is restored once bit for bit and once through each codec, and the text's
next tokens are teacher-forced after each restore. Figures compare the distributions at those tokens::

    KL(P_exact || P_codec) in nats, mean and 99th percentile; how often both have the same likeliest token

A codec that is fitted to the model is fitted on another text, so that nothing is scored that the fit has seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentkv import __version__
from agentkv.codecs import CODECS, Codec, Fit, KVBlock
from agentkv.engine.direct import prefill, step
from agentkv.engine.encode import Encoder
from agentkv.engine.fitting import FITTERS, coarser, steps_to_try
from agentkv.engine.frozen import FEWEST_TOKENS, FrozenState
from agentkv.engine.loading import LoadedModel
from agentkv.engine.machine import machine
from agentkv.engine.recall import NEEDLES, NeedleChat, answers, needle_chat, recalled
from agentkv.engine.sensitivity import kv_sensitivity
from agentkv.engine.texts import Text, encoded, fitted_texts, scored_text
from agentkv.errors import EngineFailed, InvalidRequest
from agentkv.kv.contract import LAYOUTS, Layout, SequenceKV
from agentkv.kv.recurrent import layout_for
from agentkv.logs import Log
from agentkv.models.gate import DEFAULT_MAX_KL, Calibration, CodecResult, LayoutResult, TextFacts

__all__ = ["Calibrated", "Scorer", "calibrate", "divergence"]

log = Log(__name__)

PREFIX_TOKENS, SCORED_TOKENS = 6000, 1024
_SCORED_ROWS = 128
"""Tokens scored in one step: bounds the memory of logits."""
_FIT_TOKENS = 3000
"""Of each text that codecs are fitted on."""
_SENSITIVITY_TOKENS, _SENSITIVITY_TEXTS = 2560, 2
_CHAT_TOKENS = 1500
_REFERENCE = "raw"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, eq=False)
class Calibrated:
    """A report, and the fits that its results name."""

    report: Calibration
    fits: tuple[Fit, ...]


def calibrate(
    model: LoadedModel,
    *,
    text: Path | None = None,
    prefix: int | None = None,
    scored: int | None = None,
    max_kl: float = DEFAULT_MAX_KL,
    say: Say = lambda line: None,
) -> Calibrated:
    """Measure every codec that is registered; of those that can be fitted, the coarsest fit inside ``max_kl`` too.

    Blocking; the model's thread must not be running. ``prefix`` and ``scored`` tokens of ``text`` (the shipped one) are
    used; left out, as many of 6,000 and 1,024 as the model's context holds. ``say`` is told what goes on.

    Raises ``InvalidRequest`` for a text that is too short, a context that does not hold them, a model without tokenizer
    or without full attention; ``EngineFailed`` where even a lossless restore changes the distributions, so that nothing
    can be measured here.
    """
    prefix, scored = _lengths(model.context_limit, prefix, scored)
    feed = scored_text(text)
    head = Encoder(model.tokenizer).bos() if model.tokenizer is not None else []
    ids = [*head, *encoded(feed, model.tokenizer, prefix + scored - len(head))]
    chat = needle_chat(model.tokenizer, feed.content, min(_CHAT_TOKENS, model.context_limit // 2))

    say(f"prefilling {prefix:,} tokens of the text ({feed.source})")
    score = Scorer(model, ids[:prefix], ids[prefix:])
    asked = None if chat is None else _Asked(model, chat)
    results, tried, fits = [], [], []
    names = sorted((name for name in CODECS if name != _REFERENCE), key=lambda name: not CODECS.get(name).exact)
    for name in names:
        say(f"measuring {name}")
        codec = CODECS.get(name)
        results += _with_recall(score.measure(name, codec), codec, asked)
    fit_text = None
    if fitters := [name for name in names if name in FITTERS]:
        blocks, fit_text = _fit_blocks(model, say)
        matters = _sensitivity(model, say)
        for name in fitters:
            fit, found = _strongest(FITTERS[name](blocks, matters), score, max_kl, say)
            if fit is not None and found:
                best = found[-1].model_copy(update={"codec": f"{name}+basis"})
                results += _with_recall(best, CODECS.get(name).fitted(fit), asked)
                fits.append(fit)
            tried += found[:-1]
    lossy = [name for name in LAYOUTS if LAYOUTS.get(name).lossy and name.count(":") == 1]
    layouts = []
    for name in lossy:
        say(f"measuring layout {name}")
        layouts += [found for found in [score.measure_layout(name)] if found is not None]
    report = Calibration(
        agentkv=__version__,
        kv_fingerprint=model.fingerprints.kv,
        model=model.name,
        model_type=model.model_type,
        dtype=model.adapter.geometry.dtype,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine(model.adapter.device),
        text=_facts(feed, len(ids)),
        fit_text=fit_text,
        prefix_tokens=prefix,
        scored_tokens=scored,
        lossy_tokens=score.frozen.lossy_tokens,
        needles=0 if asked is None else len(NEEDLES),
        max_kl=max_kl,
        codecs=tuple(results),
        tried=tuple(tried),
        layouts=tuple(layouts),
    )
    return Calibrated(report, tuple(fits))


def divergence(reference: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """``KL(P || Q)`` in nats, float64 ``[T]``, and whether both have the same likeliest token, bool ``[T]``.

    ``reference`` (P) and ``other`` (Q): logits ``[T, vocab]`` of any floating dtype; log-softmax in float32.
    """
    p, q = (logits.to(torch.float32).log_softmax(-1) for logits in (reference, other))
    mass = p.exp()
    terms = torch.where(mass > 0, mass * (p - q), 0.0)
    return terms.sum(-1, dtype=torch.float64), p.argmax(-1) == q.argmax(-1)


class Scorer:
    """A prefix's state, and the distributions after its bit-exact restore."""

    def __init__(self, model: LoadedModel, prefix: Sequence[int], scored: Sequence[int]) -> None:
        self._model, self._ids = model, scored
        self.frozen = _frozen(model, prefix)
        self._state = self.frozen.encode(CODECS.get(_REFERENCE))
        restored = self.frozen.restore(self._state, len(scored))
        self._reference = [logits.cpu() for logits in self._logits(self._model.layout, restored.kv)]
        restored.kv.close()

    def _logits(self, layout: Layout[Any], kv: SequenceKV) -> Iterator[Tensor]:
        for start in range(0, len(self._ids), _SCORED_ROWS):
            ids = self._ids[start : start + _SCORED_ROWS]
            yield step(self._model.adapter, layout, [(kv, ids)], rows="all")

    def _divergences(self, layout: Layout[Any], kv: SequenceKV) -> tuple[Tensor, Tensor]:
        """KL in nats, and whether the likeliest token is the same, of each scored token. Closes ``kv``."""
        logits = zip(self._reference, self._logits(layout, kv), strict=True)
        pairs = [divergence(a.to(b.device), b) for a, b in logits]
        kv.close()
        return torch.cat([kl.cpu() for kl, _ in pairs]), torch.cat([same.cpu() for _, same in pairs])

    def measure_layout(self, name: str) -> LayoutResult | None:
        """What the live layout ``name`` does to the same state, restored bit for bit into it."""
        layout = layout_for(LAYOUTS.get(name), self._model.adapter.geometry, self._model.adapter.device)
        kv = self.frozen.restore(self._state, len(self._ids), layout).kv
        nbytes = kv.nbytes
        kl, same = self._divergences(layout, kv)
        if not bool(kl.isfinite().all()):
            detail = f"{name} is left out: it gives no finite logits"
            log.warning("layout_not_measured", layout=name, model=self._model.name, detail=detail)
            return None
        return LayoutResult(
            layout=name,
            ratio=self.frozen.nbytes / nbytes,
            mean_kl=kl.mean().item(),
            p99_kl=kl.quantile(0.99).item(),
            top1=same.double().mean().item(),
        )

    def measure(self, label: str, codec: Codec, fit: Fit | None = None) -> CodecResult | None:
        """All but the recall; ``None``, with a warning in the log, where a restore gives no distribution at all."""
        frozen = self.frozen
        state = frozen.encode(codec)
        restored = frozen.restore(state, len(self._ids))
        kl, same = self._divergences(self._model.layout, restored.kv)
        if codec.exact and bool((kl != 0).any()):
            raise EngineFailed(
                f"the control failed: after a lossless restore ({label}) the distributions differ by up to "
                f"{kl.abs().max().item():.2g} nats, so that nothing can be measured on this device"
            )
        if not bool(kl.isfinite().all()):
            detail = f"{label} is left out: what it restores gives no finite logits"
            log.warning("codec_not_measured", codec=label, model=self._model.name, detail=detail)
            return None
        equivalent = frozen.lossy_nbytes / frozen.geometry.itemsize * 2 / 1e6
        return CodecResult(
            codec=label,
            encoder=codec.name,
            fit=None if fit is None else fit.digest,
            step=None if fit is None else fit.facts.get("step", 1.0),
            ratio=frozen.lossy_nbytes / state.nbytes,
            session_ratio=frozen.nbytes / state.session_nbytes,
            mean_kl=kl.mean().item(),
            p99_kl=kl.quantile(0.99).item(),
            top1=same.double().mean().item(),
            bytes_per_token=state.nbytes / frozen.lossy_tokens,
            session_bytes_per_token=state.session_nbytes / len(frozen.ids),
            encode_mb_s=equivalent / state.seconds,
            decode_mb_s=equivalent / restored.seconds,
            encode_mb_s_one_thread=equivalent / state.seconds_alone,
            decode_mb_s_one_thread=equivalent / restored.seconds_alone,
        )


class _Asked:
    """A chat with planted facts, and the answers after its bit-exact restore."""

    def __init__(self, model: LoadedModel, chat: NeedleChat) -> None:
        self._model, self._chat = model, chat
        self._frozen = _frozen(model, chat.ids)
        self._reference = self._answers(CODECS.get(_REFERENCE))

    def _answers(self, codec: Codec) -> list[tuple[int, ...]]:
        room = max(map(len, self._chat.questions)) + 64
        kv = self._frozen.restore(self._frozen.encode(codec), room).kv
        try:
            return answers(self._model.adapter, self._model.layout, kv, self._chat, self._model.piece)
        finally:
            kv.close()

    def compare(self, codec: Codec) -> tuple[float, float]:
        """The share of facts found, and that of answers equal to the exact ones."""
        found = self._answers(codec)
        same = sum(a == b for a, b in zip(found, self._reference, strict=True)) / len(found)
        return recalled(self._model.tokenizer, found, self._model.end_ids), same


def _with_recall(result: CodecResult | None, codec: Codec, asked: _Asked | None) -> list[CodecResult]:
    """The result, if there is one, with the answers after a restore through ``codec``."""
    if result is None or asked is None:
        return [] if result is None else [result]
    recall, same = asked.compare(codec)
    return [result.model_copy(update={"recall": recall, "same_answers": same})]


def _strongest(fit: Fit, score: Scorer, max_kl: float, say: Say) -> tuple[Fit | None, list[CodecResult]]:
    """The coarsest fit inside ``max_kl``, the finest where none is, and what was measured: its own result last."""
    found: dict[float, CodecResult] = {}
    for times in steps_to_try(lambda times: times in found and found[times].mean_kl <= max_kl):
        tried = coarser(fit, times)
        label = f"{fit.codec}+basis x{times:g}"
        say(f"measuring {label}")
        result = score.measure(label, CODECS.get(fit.codec).fitted(tried), tried)
        if result is not None:
            found[times] = result
    if not found:
        return None, []
    best = max((times for times, result in found.items() if result.mean_kl <= max_kl), default=min(found))
    return coarser(fit, best), [*(result for times, result in found.items() if times != best), found[best]]


def _fit_blocks(model: LoadedModel, say: Say) -> tuple[list[KVBlock], TextFacts]:
    """KV of texts that are not scored, in chunks as the store cuts them, sinks and tails left out."""
    head = Encoder(model.tokenizer).bos()
    blocks, used, total = [], [], 0
    for text in fitted_texts():
        ids = [*head, *encoded(text, model.tokenizer)][: min(_FIT_TOKENS, model.context_limit)]
        if len(ids) < FEWEST_TOKENS:
            continue
        say(f"fitting on {len(ids):,} tokens of another text ({text.source})")
        blocks += _frozen(model, ids).chunks()
        used.append(text)
        total += len(ids)
    joined = Text(", ".join(text.source for text in used), "\n\n".join(text.content for text in used))
    return blocks, _facts(joined, total)


def _sensitivity(model: LoadedModel, say: Say) -> dict[int, tuple[Tensor, Tensor]] | None:
    """What an error in each head costs, measured on two of the texts that fits are made of; ``None`` where they are
    too short for it, and with recurrent layers, whose states transformers overwrites: no gradient goes through them."""
    if model.adapter.geometry.recurrent:
        return None
    head = Encoder(model.tokenizer).bos()
    texts = [[*head, *encoded(text, model.tokenizer)] for text in fitted_texts()]
    size = min(_SENSITIVITY_TOKENS, model.context_limit)
    rows = [ids[:size] for ids in texts if len(ids) >= size][:_SENSITIVITY_TEXTS]
    if not rows or size < FEWEST_TOKENS:
        return None
    say(f"measuring what each head matters to {size // 5:,} tokens after {size - size // 5:,} stored ones")
    adapter = model.adapter
    return kv_sensitivity(model.path, rows, size // 5, device=adapter.device, dtype=adapter.model.dtype)


def _frozen(model: LoadedModel, ids: Sequence[int]) -> FrozenState:
    kv = model.layout.open(len(ids), len(ids))
    try:
        prefill(model.adapter, model.layout, kv, ids, model.piece)
        return FrozenState(model.layout, kv, model.fingerprints.kv)
    finally:
        kv.close()


def _lengths(limit: int, prefix: int | None, scored: int | None) -> tuple[int, int]:
    """Tokens of prefix and scored text that fit the model's context."""
    if scored is None:
        scored = min(SCORED_TOKENS, limit // 4)
    if prefix is None:
        prefix = min(PREFIX_TOKENS, limit - scored)
    if scored < 1 or prefix < FEWEST_TOKENS:
        raise InvalidRequest(
            f"calibration needs a prefix of at least {FEWEST_TOKENS:,} tokens and one to score, not {prefix:,} and "
            f"{scored:,} (the model's context is {limit:,})",
            param="tokens",
        )
    if prefix + scored > limit:
        raise InvalidRequest(
            f"{prefix:,} tokens and {scored:,} to score do not fit the model's context of {limit:,}: lower --tokens",
            param="tokens",
        )
    return prefix, scored


def _facts(text: Text, tokens: int) -> TextFacts:
    return TextFacts(source=text.source, digest=text.digest, tokens=tokens)
