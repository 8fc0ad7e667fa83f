"""The gate: a calibration's report, and which codec it lets through. Plain values; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "DEFAULT_MAX_KL",
    "Calibration",
    "CodecResult",
    "LayoutResult",
    "TextFacts",
    "auto_codec",
    "choose",
    "current_fits",
    "forgetful",
    "fragile",
    "layout_trouble",
]

DEFAULT_MAX_KL = 0.005
"""Nats. Any perturbation of a bf16 model's KV costs about 0.0015 (DESIGN §8)."""

_FRAGILE = ("qwen2", "gpt_oss")
_UNCALIBRATED = "int8"

_Number = Annotated[float, Field(allow_inf_nan=False)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CodecResult(_Frozen):
    """What one codec did to one model.

    ``codec``: its name in the report, with a suffix where it was measured in several ways (``compact+basis``);
    ``encoder``: its name in the registry; ``fit``: digest of the fit that it encodes with, ``step`` how coarse that is.
    ``ratio``: bytes of the spans that lossy codecs code, over what they take with chunk headers and side data; the same
    for the whole session, lossless parts included, in ``session_ratio``. Bytes a token likewise.
    ``mean_kl``, ``p99_kl``: nats, of next-token distributions against a bit-exact restore; ``top1``: the share of
    tokens whose likeliest successor is the same.
    Rates: MB a second of bf16, by two threads as the store runs it, and by one.
    ``recall``: share of the planted facts that greedy answers name; ``None`` where there is no chat template.
    """

    codec: str
    encoder: str
    fit: str | None
    step: _Positive | None = None
    ratio: _Positive
    session_ratio: _Positive
    mean_kl: _Number
    p99_kl: _Number
    top1: Annotated[float, Field(ge=0, le=1)]
    bytes_per_token: _Positive
    session_bytes_per_token: _Positive
    encode_mb_s: _Positive
    decode_mb_s: _Positive
    encode_mb_s_one_thread: _Positive
    decode_mb_s_one_thread: _Positive
    recall: Annotated[float, Field(ge=0, le=1)] | None = None
    same_answers: Annotated[float, Field(ge=0, le=1)] | None = None


class LayoutResult(_Frozen):
    """What a live layout that holds older tokens with loss did to one model.

    ``ratio``: bytes of the state as numbers, over what the layout reserved for it. KL and agreement as in
    ``CodecResult``.
    """

    layout: str
    ratio: _Positive
    mean_kl: _Number
    p99_kl: _Number
    top1: Annotated[float, Field(ge=0, le=1)]


class TextFacts(_Frozen):
    """A text that was fed: where it is from, blake3 of its bytes, how many of its tokens were used."""

    source: str
    digest: str
    tokens: Annotated[int, Field(ge=0)]


class Calibration(_Frozen):
    """One run of ``agentkv calibrate``. ``date`` is UTC, ISO 8601.

    Of ``text``, ``prefix_tokens`` were stored and restored and the next ``scored_tokens`` teacher-forced after them;
    ``lossy_tokens`` of the prefix went through the codecs, the others stayed lossless. ``fit_text`` is what fits were
    made from. ``needles``: facts planted for the recall; 0 without a chat template.
    ``codecs`` are what there is to choose from; fits that were ``tried`` on the way to the strongest inside ``max_kl``
    are not kept.
    """

    format: Literal[1] = 1
    agentkv: str
    kv_fingerprint: str
    model: str
    model_type: str
    dtype: str
    date: str
    machine: dict[str, Any]
    text: TextFacts
    fit_text: TextFacts | None
    prefix_tokens: int
    scored_tokens: int
    lossy_tokens: int
    needles: int
    max_kl: _Number
    codecs: tuple[CodecResult, ...]
    tried: tuple[CodecResult, ...] = ()
    layouts: tuple[LayoutResult, ...] = ()


def fragile(model_type: str) -> bool:
    """Whether KV of this family is known to break where others do not, so that it stays lossless until measured.

    Qwen2 and Qwen2.5: keys have huge biases in their first and last layers. Coded by token, after RoPE, the bias takes
    the whole range of four bits and the text turns to nonsense; codecs that remove a channel's mean before RoPE absorb
    it, which a calibration confirms per model. gpt-oss: its softmax has learned sinks, for which measurements on other
    families do not speak (DESIGN §8).
    """
    return model_type.startswith(_FRAGILE)


def choose(report: Calibration, max_kl: float = DEFAULT_MAX_KL) -> CodecResult | None:
    """The strongest result (by ratio) whose mean KL is at most ``max_kl`` nats; ``None`` where there is none.

    KL over running text says little of facts that are looked up once, far back: a codec after which the model finds
    fewer of the planted ones than after an exact restore, by more than one, is not chosen.
    """
    return _strongest(report, report.codecs, max_kl)


def forgetful(result: CodecResult, report: Calibration) -> bool:
    """Whether planted facts are lost that an exact restore finds: more than one of them, which is chance."""
    exact = max((r.recall for r in report.codecs if r.encoder == "exact" and r.recall is not None), default=None)
    if exact is None or result.recall is None or not report.needles:
        return False
    return (exact - result.recall) * report.needles > 1.5


def layout_trouble(layout: str, report: Calibration | None, max_kl: float = DEFAULT_MAX_KL) -> str | None:
    """Why a lossy live layout may make answers worse than the gate allows; ``None`` where it was measured not to."""
    if report is None:
        return f"layout {layout} holds older tokens with loss, and what that does to this model was never measured"
    found = next((result for result in report.layouts if result.layout == layout), None)
    if found is None:
        return f"layout {layout} holds older tokens with loss, and the last calibration did not measure it"
    if found.mean_kl > max_kl:
        return f"layout {layout} costs mean KL {found.mean_kl:.4f}, and max_kl is {max_kl:g}"
    return None


def current_fits(report: Calibration, max_kl: float = DEFAULT_MAX_KL) -> dict[str, str]:
    """By codec name, the digest of the fit to encode with: that of its strongest result inside ``max_kl``.

    Codecs that do best without one are left out; where no result of a codec is inside, its most faithful one counts.
    """
    fits = {}
    for encoder in {result.encoder for result in report.codecs}:
        own = [result for result in report.codecs if result.encoder == encoder]
        best = _strongest(report, own, max_kl) or min(own, key=lambda result: result.mean_kl)
        if best.fit is not None:
            fits[encoder] = best.fit
    return fits


def _strongest(report: Calibration, results: Sequence[CodecResult], max_kl: float) -> CodecResult | None:
    inside = [result for result in results if result.mean_kl <= max_kl and not forgetful(result, report)]
    return max(inside, key=lambda result: result.ratio, default=None)


def auto_codec(
    model_type: str, report: Calibration | None, max_kl: float = DEFAULT_MAX_KL, *, model: str = "MODEL"
) -> tuple[str, str]:
    """What ``idle_codec="auto"`` means: the codec's name in the registry, and why, for a person.

    ``model_type`` as in a model's configuration; ``model`` is what the user calls it.
    """
    if report is None:
        advice = f"`agentkv calibrate {model}` measures which codec it bears"
        if fragile(model_type):
            return "exact", f"never calibrated, and {model_type} belongs to a fragile family; {advice}"
        return _UNCALIBRATED, f"never calibrated; {advice}"
    best = choose(report, max_kl)
    when = report.date[:10]
    if best is None:
        return "exact", f"calibrated on {when}: no codec kept mean KL within {max_kl:g}"
    return best.encoder, (
        f"calibrated on {when}: {best.codec} is the strongest within max_kl {max_kl:g}, "
        f"{best.ratio:.2f}x at mean KL {best.mean_kl:.4f}"
    )
