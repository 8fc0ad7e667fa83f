"""The picture of ``agentkv calibrate --plot``: how many times smaller, against what it costs in KL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentkv.errors import InvalidRequest

if TYPE_CHECKING:
    from agentkv.models.gate import Calibration, CodecResult

__all__ = ["check_plotting", "draw"]

_LINEAR_KL = 1e-3
"""Below, the axis is linear, so that lossless codecs have their place at 0; above, logarithmic."""
_HIGHEST = 12
"""What costs more than so many times ``max_kl`` is beyond the picture."""
_TICKS = (0, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_INSIDE, _OUTSIDE, _CHOSEN = "#3b6fb6", "#8c8c8c", "#c8442d"


def check_plotting(path: Path, option: str = "--plot") -> None:
    """Before minutes of measuring: ``InvalidRequest`` without matplotlib, or where ``path`` cannot be a picture."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InvalidRequest(
            f"{option} needs matplotlib, which is not installed: pip install 'agentkv[plot]'", param=option[2:]
        ) from None
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InvalidRequest(f"{option} draws .png, .svg or .pdf, not {path.name!r}", param=option[2:])
    if not path.absolute().parent.is_dir():
        raise InvalidRequest(f"{option} cannot write {path}: its folder does not exist", param=option[2:])


def draw(report: Calibration, path: Path) -> None:
    """Write the picture to ``path``. Results inside ``max_kl`` are coloured, the chosen one stands out.

    A line joins the fits that were tried: how the strongest codec's cost grows with its ratio on this model.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    from agentkv.models.gate import choose

    max_kl, chosen = report.max_kl, choose(report, report.max_kl)
    top = _HIGHEST * max(max_kl, _LINEAR_KL)
    shown = [result for result in report.codecs if result.mean_kl <= top]
    tried = [result for result in report.tried if result.mean_kl <= top]
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.set_yscale("symlog", linthresh=_LINEAR_KL, linscale=0.7)
    highest = max([max_kl, *(result.mean_kl for result in (*shown, *tried))])
    axes.set_ylim(-0.0002, 1.8 * max(highest, _LINEAR_KL))
    axes.set_xlim(0.7, 1.18 * max((result.ratio for result in (*shown, *tried)), default=1.0))
    axes.axhspan(-0.0002, max_kl, color=_INSIDE, alpha=0.07, linewidth=0)
    axes.axhline(max_kl, color=_INSIDE, linewidth=1, linestyle="--")
    axes.annotate(
        f"max_kl {max_kl:g}",
        (0.01, max_kl),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        color=_INSIDE,
        fontsize=9,
    )
    for encoder in {result.encoder for result in tried}:
        family = [r for r in (*tried, *shown) if r.encoder == encoder and r.fit is not None]
        family.sort(key=lambda result: result.ratio)
        line = [r.ratio for r in family], [r.mean_kl for r in family]
        axes.plot(*line, color=_OUTSIDE, linewidth=1, marker="o", markersize=4, markerfacecolor="white", zorder=2)
    for result in shown:
        _point(axes, result, shown, max_kl, is_chosen=chosen is not None and result.codec == chosen.codec)
    axes.yaxis.set_major_locator(FixedLocator(_TICKS))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}x"))
    axes.set_xlabel("times smaller than raw KV, chunk headers counted")
    axes.set_ylabel("mean KL of the next token, nats")
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


def _point(axes: Any, result: CodecResult, others: list[CodecResult], max_kl: float, *, is_chosen: bool) -> None:
    """A dot and its name: on the right below it, where the curve of fits does not come, unless another dot is there."""
    from matplotlib.patheffects import withStroke

    colour = _CHOSEN if is_chosen else _INSIDE if result.mean_kl <= max_kl else _OUTSIDE
    axes.scatter([result.ratio], [result.mean_kl], s=70 if is_chosen else 45, color=colour, zorder=3)
    taken = any(0 < o.ratio - result.ratio < 1.2 and 0.6 < o.mean_kl / max(result.mean_kl, 1e-9) < 1 for o in others)
    place: dict[str, Any] = {"xytext": (7, -6), "va": "top"}
    if taken:
        place = {"xytext": (-7, 6), "va": "bottom", "ha": "left" if result.ratio < axes.get_xlim()[1] / 5 else "right"}
    axes.annotate(
        f"{result.codec} {result.ratio:.2f}x" + ("\nchosen" if is_chosen else ""),
        (result.ratio, result.mean_kl),
        textcoords="offset points",
        color=colour,
        fontsize=9,
        path_effects=[withStroke(linewidth=3, foreground="white")],
        **place,
    )
