"""The picture of ``agentkv calibrate --plot``: how many times smaller, against what it costs in KL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentkv.errors import InvalidRequest

if TYPE_CHECKING:
    from agentkv.models.gate import Calibration, CodecResult

__all__ = ["check_plotting", "draw"]

_LEAST_KL = 1e-5
"""Where lossless results stand on the logarithmic axis."""
_INSIDE, _OUTSIDE, _CHOSEN = "#3b6fb6", "#a8a8a8", "#c8442d"


def check_plotting(path: Path) -> None:
    """Before minutes of measuring: ``InvalidRequest`` without matplotlib, or where ``path`` cannot be a picture."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InvalidRequest(
            "--plot needs matplotlib, which is not installed: pip install 'agentkv[plot]'", param="plot"
        ) from None
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InvalidRequest(f"--plot draws .png, .svg or .pdf, not {path.name!r}", param="plot")
    if not path.absolute().parent.is_dir():
        raise InvalidRequest(f"--plot cannot write {path}: its folder does not exist", param="plot")


def draw(report: Calibration, path: Path) -> None:
    """Write the picture to ``path``. Results inside ``max_kl`` are coloured, the chosen one stands out."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    from agentkv.models.gate import choose

    max_kl = report.max_kl
    chosen = choose(report, max_kl)
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    axes = figure.subplots()
    heights = [max(result.mean_kl, _LEAST_KL) for result in report.codecs]
    top = 3 * max([max_kl, *heights])
    axes.set_yscale("log")
    axes.set_ylim(_LEAST_KL / 2, top)
    axes.set_xlim(0.8, 1.12 * max(result.ratio for result in report.codecs) + 0.3)
    axes.axhspan(_LEAST_KL / 2, max_kl, color=_INSIDE, alpha=0.07, linewidth=0) if max_kl > _LEAST_KL / 2 else None
    if max_kl > _LEAST_KL / 2:
        axes.axhline(max_kl, color=_INSIDE, linewidth=1, linestyle="--")
        axes.annotate(
            f"max_kl {max_kl:g}",
            (0.005, max_kl),
            xycoords=("axes fraction", "data"),
            xytext=(2, 3),
            textcoords="offset points",
            color=_INSIDE,
            fontsize=9,
        )
    for result, height in zip(report.codecs, heights, strict=True):
        _point(axes, result, height, max_kl, is_chosen=chosen is not None and result.codec == chosen.codec)
    axes.set_xlabel("times smaller than raw KV (lossy spans, chunk headers counted)")
    axes.set_ylabel("mean KL of the next token, nats")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: "0" if value <= _LEAST_KL * 1.01 else f"{value:g}"))
    axes.set_title(
        f"{report.model}, {report.dtype}: {report.prefix_tokens:,} tokens restored, {report.scored_tokens:,} scored",
        fontsize=11,
        loc="left",
    )
    axes.grid(True, which="major", color="#e3e3e3", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path)
    except OSError as error:
        raise InvalidRequest(f"--plot cannot write {path}: {error.strerror}", param="plot") from error


def _point(axes: Any, result: CodecResult, height: float, max_kl: float, *, is_chosen: bool) -> None:
    colour = _CHOSEN if is_chosen else _INSIDE if result.mean_kl <= max_kl else _OUTSIDE
    axes.scatter([result.ratio], [height], s=70 if is_chosen else 45, color=colour, zorder=3)
    label = f"{result.codec}\n{result.ratio:.2f}x" + (", chosen" if is_chosen else "")
    axes.annotate(
        label, (result.ratio, height), xytext=(8, 0), textcoords="offset points", va="center", color=colour, fontsize=9
    )
