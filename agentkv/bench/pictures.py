"""Pictures of what was measured: one a question, each as a PNG."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agentkv.cli.plot import draw
from agentkv.models.gate import Calibration

__all__ = ["draw_all"]

_COLD, _RESUMED, _OTHER = "#8c8c8c", "#3b6fb6", "#c8442d"
_LINES = ("#3b6fb6", "#c8442d", "#4f9d5d", "#8c6bb1", "#8c8c8c")

Results = Mapping[str, Mapping[str, Any]]


def draw_all(results: Results, out: Path) -> dict[str, Path]:
    """Draw what there are ``results`` for into the folder ``out``; each part's picture. Blocking."""
    drawn: dict[str, Path] = {}
    for name, picture in _PICTURES.items():
        if name in results:
            drawn[name] = out / f"{name}.png"
            picture(results[name], drawn[name])
    return drawn


def _axes(title: str, x: str, y: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, which="major", color="#e3e3e3", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _resume(result: Mapping[str, Any], path: Path) -> None:
    """First token by length: cold, transformers' own prefill, and resumed from disk."""
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    rows = result["lengths"]
    lengths = [row["tokens"] for row in rows]
    first = rows[0]
    figure, axes = _axes(
        f"First token, {first['model']} in {first['dtype']}, codec {first['codec']}",
        "tokens of the conversation that comes back",
        "seconds to the first token",
    )
    axes.plot(lengths, [row["transformers_cold_s"] for row in rows], "o--", color=_OTHER, label="transformers, prefill")
    axes.plot(lengths, [row["cold_ttft_s"] for row in rows], "o-", color=_COLD, label="cold: everything computed")
    axes.plot(lengths, [row["resumed_ttft_s"] for row in rows], "o-", color=_RESUMED, label="resumed from disk")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g} s"))
    for row in rows:
        axes.annotate(
            f"{row['ratio']:.1f}x",
            (row["tokens"], row["resumed_ttft_s"]),
            textcoords="offset points",
            xytext=(0, -14),
            ha="center",
            fontsize=9,
            color=_RESUMED,
        )
    axes.margins(y=0.18)
    axes.legend(frameon=False)
    figure.savefig(path)


def _growth(result: Mapping[str, Any], path: Path) -> None:
    """Bytes on the device as a conversation grows, a line a policy."""
    from matplotlib.ticker import StrMethodFormatter

    figure, axes = _axes(
        f"Memory of one conversation, {result['model']} in {result['dtype']}",
        "tokens said so far",
        "MiB of KV on the device",
    )
    # Windows of one size lie on one another: each line shows where the dashes of the others leave room.
    bounded = len(result["policies"]) - 1
    for index, ((policy, line), colour) in enumerate(zip(result["policies"].items(), _LINES, strict=False)):
        dashes: Any = "-" if index == 0 or bounded < 2 else (3 * (index - 1), (3, 3 * (bounded - 1)))
        tokens = [point[0] for point in line["points"]]
        held = [point[1] / 2**20 for point in line["points"]]
        axes.plot(tokens, held, color=colour, linewidth=2, linestyle=dashes, label=policy)
        if line["ended"] is not None and tokens:
            axes.plot(tokens[-1:], held[-1:], "x", color=colour, markersize=8)
            axes.annotate(
                "context ends",
                (tokens[-1], held[-1]),
                textcoords="offset points",
                xytext=(8, 0),
                va="center",
                fontsize=9,
                color=colour,
            )
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.legend(frameon=False)
    figure.savefig(path)


def _residency(result: Mapping[str, Any], path: Path) -> None:
    """Reused share and summed time to first token, a bar a residency policy."""
    policies = result["policies"]
    names = list(policies)
    figure, axes = _axes(
        f"{result['sessions']} agents, device memory for {result['device_budget_sessions']:g}",
        "",
        "share of known tokens that were reused",
    )
    shares = [policies[name]["reused_share"] for name in names]
    bars = axes.bar(names, shares, color=[_RESUMED if name == "cost" else _COLD for name in names], width=0.55)
    axes.bar_label(
        bars,
        [
            f"{policies[name]['reused_share']:.1%}\nfirst tokens: {policies[name]['ttft_sum_s']:.1f} s in all"
            for name in names
        ],
        fontsize=9,
        padding=3,
    )
    axes.set_ylim(0, 1.25)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    axes.grid(False, axis="x")
    figure.savefig(path)


def _codecs(result: Mapping[str, Any], path: Path) -> None:
    """KL against ratio, as ``agentkv calibrate --plot`` draws it."""
    fields = {name: value for name, value in result.items() if name in Calibration.model_fields}
    draw(Calibration.model_validate(fields), path)


_PICTURES: dict[str, Callable[[Mapping[str, Any], Path], None]] = {
    "resume": _resume,
    "growth": _growth,
    "residency": _residency,
    "codecs": _codecs,
}
