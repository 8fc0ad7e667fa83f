"""``agentkv calibrate``: what each codec does to a model's answers, and which of them ``idle_codec=auto`` may use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentkv.cli.display import error_console, out_console, print_json
from agentkv.cli.options import AsJson, Device, Dtype, HomeFolder, settings_from

if TYPE_CHECKING:
    from agentkv.models.gate import Calibration, CodecResult

__all__ = ["calibrate"]


def calibrate(
    model: Annotated[str, typer.Argument(help="Catalogue name, local folder, .gguf file, or Hugging Face id.")],
    text: Annotated[Path | None, typer.Option("--text", help="Text to score instead of the shipped one.")] = None,
    tokens: Annotated[
        int | None,
        typer.Option("--tokens", help="Tokens stored and restored [6000, or what the model takes]."),
    ] = None,
    score: Annotated[
        int | None, typer.Option("--score", help="Tokens scored after them [1024, or what the model takes].")
    ] = None,
    max_kl: Annotated[
        float | None, typer.Option("--max-kl", min=0.0, help="Mean KL in nats that a codec may cost [setting max_kl].")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw KL against ratio into this PNG.")] = None,
    home: HomeFolder = None,
    device: Device = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Measure what each codec does to a model, and keep the result: idle_codec=auto goes by it.

    A text is prefilled, restored through each codec, and its next tokens are scored against a bit-exact restore.
    """
    from agentkv.cli.pulling import pull_shown

    if plot is not None:
        from agentkv.cli.plot import check_plotting

        check_plotting(plot)
    # A lossy live layout would be part of what every codec is compared with.
    settings = settings_from(home=home, model=model, max_kl=max_kl, device=device, dtype=dtype, layout="auto")
    local = pull_shown(model, settings)

    from agentkv.engine.calibration import calibrate as measure
    from agentkv.engine.loading import load
    from agentkv.models.calibrations import load_calibration, save_calibration
    from agentkv.models.gate import auto_codec

    progress = error_console()
    done = measure(
        load(local, settings),
        text=text,
        prefix=tokens,
        scored=score,
        max_kl=settings.max_kl,
        say=lambda line: progress.print(f"{line} …", markup=False),
    )
    report = done.report
    folder = save_calibration(settings.home, report, done.fits)
    stored = load_calibration(settings.home, report.kv_fingerprint)
    codec, reason = auto_codec(report.model_type, stored.report, settings.max_kl, model=model)
    if plot is not None:
        from agentkv.cli.plot import draw

        draw(report, plot)
    if as_json:
        print_json({**report.model_dump(), "auto": codec, "reason": reason, "folder": str(folder)})
        return
    _print(report)
    console = out_console()
    console.print(f"auto means [bold]{codec}[/]: {reason}", soft_wrap=True, highlight=False)
    console.print(f"kept in {folder}", markup=False, soft_wrap=True)
    if plot is not None:
        console.print(f"drawn into {plot}", markup=False, soft_wrap=True)


def _print(report: Calibration) -> None:
    from rich.table import Table

    console = out_console()
    console.print(
        f"{report.model}, {report.dtype}: {report.prefix_tokens:,} tokens of the {report.text.source} text stored and "
        f"restored, {report.lossy_tokens:,} of them through the codec; the next {report.scored_tokens:,} scored",
        markup=False,
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("codec")
    names = ("ratio", "session", "B/token", "mean KL", "p99 KL", "top-1", "encode", "decode", "facts")
    for name in names:
        table.add_column(name, justify="right")
    for result in sorted(report.codecs, key=lambda result: result.ratio):
        table.add_row(*_row(result), style=None if result.mean_kl <= report.max_kl else "dim")
    console.print(table)
    for live in report.layouts:
        console.print(
            f"layout {live.layout}: {live.ratio:.2f}x on the device, mean KL {live.mean_kl:.5f}, top-1 {live.top1:.1%}"
        )
    console.print(
        f"ratio: of what codecs code, chunk headers counted; session: of all {report.prefix_tokens:,} tokens; "
        "encode and decode: MB of bf16 a second on two threads."
        + (f" Facts: share of {report.needles} that answers name." if report.needles else ""),
        markup=False,
        soft_wrap=True,
    )


def _row(result: CodecResult) -> list[str]:
    recall: Any = "-" if result.recall is None else f"{result.recall:.0%}"
    return [
        result.codec,
        f"{result.ratio:.2f}x",
        f"{result.session_ratio:.2f}x",
        f"{result.bytes_per_token:,.0f}",
        f"{result.mean_kl:.5f}",
        f"{result.p99_kl:.4f}",
        f"{result.top1:.1%}",
        f"{result.encode_mb_s:,.0f}",
        f"{result.decode_mb_s:,.0f}",
        recall,
    ]
