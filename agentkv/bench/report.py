"""What was measured, in words: ``report.md``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agentkv import __version__

__all__ = ["written_report"]

Result = Mapping[str, Any]


def written_report(results: Mapping[str, Result], pictures: Mapping[str, Path], quick: bool) -> str:
    """Markdown with a table a part, its picture beside it. ``results`` of parts that failed have an ``error``."""
    parts = {
        "resume": ("First token, cold and resumed", _resume),
        "decode": ("Tokens a second", _decode),
        "growth": ("Memory by policy", _growth),
        "stream": ("A text that outgrows its window", _stream),
        "agents": ("Many agents, memory for a few", _agents),
        "residency": ("Who leaves the device first", _residency),
        "codecs": ("Codecs", _codecs),
        "http": ("What HTTP adds", _http),
    }
    lines = ["# agentkv: measurements", "", *_about(results, quick)]
    for name, (title, table) in parts.items():
        if name not in results:
            continue
        result = results[name]
        lines += ["", f"## {title}", ""]
        if "error" in result:
            lines.append(f"Not measured: {result['error']}")
            continue
        lines += table(result)
        if name in pictures:
            lines += ["", f"![{title}]({pictures[name].name})"]
        lines += ["", f"Took {result['seconds']:,.0f} s; all figures in [{name}.json]({name}.json)."]
    return "\n".join(lines) + "\n"


def _about(results: Mapping[str, Result], quick: bool) -> Iterator[str]:
    yield f"agentkv {__version__}, {datetime.now(UTC):%Y-%m-%d}."
    machines = [facts for result in results.values() if (facts := _machine(result))]
    if machines:
        first = machines[0]
        yield f"Machine: {first['device']}, {first['cores']} cores, {first['threads']} threads; torch {first['torch']}."
    if quick:
        yield ""
        yield "**Quick**: short contexts and few repetitions. It shows that everything runs; its figures are rough."


def _machine(result: Result) -> Result | None:
    for place in (result, result.get("machine"), *(result.get("lengths") or ())[:1]):
        if place and "device" in place and "torch" in place:
            return dict(place)
    return None


def _table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" + "---:|" * (len(head) - 1)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def _resume(result: Result) -> Iterator[str]:
    yield from _table(
        ["tokens", "cold", "transformers' prefill", "resumed from disk", "cold / resumed", "same tokens"],
        [
            [
                f"{row['tokens']:,}",
                f"{row['cold_ttft_s']:.3f} s",
                f"{row['transformers_cold_s']:.3f} s",
                f"{row['resumed_ttft_s'] * 1000:.1f} ms",
                f"{row['ratio']:.1f}x",
                "yes" if row["identical"] else "no",
            ]
            for row in result["lengths"]
        ],
    )


def _decode(result: Result) -> Iterator[str]:
    yield (
        f"{result['sessions']} sessions of {result['context']:,} tokens: agentkv {result['agentkv_tok_s']:.1f} tok/s, "
        f"transformers batched {result['transformers_tok_s']:.1f} tok/s; median ratio of {result['rounds']} rounds "
        f"{result['ratio']:.2f} (from {result['ratio_min']:.2f} to {result['ratio_max']:.2f})."
    )


def _growth(result: Result) -> Iterator[str]:
    rows = []
    for policy, line in result["policies"].items():
        tokens, held = line["points"][-1] if line["points"] else (0, 0)
        rows.append([f"`{policy}`", f"{tokens:,}", f"{held / 2**20:.1f} MiB", "yes" if line["ended"] else "no"])
    yield from _table(["policy", "tokens reached", "held at the end", "ended by the context"], rows)


def _stream(result: Result) -> Iterator[str]:
    yield from _table(
        [f"last {result['tail_tokens']:,} of {result['tokens']:,} tokens", "perplexity"],
        [
            [f"`{result['policy']}`", f"{result['ppl_tail']:.2f}"],
            ["its window computed anew at each eviction", f"{result['ppl_reference']:.2f}"],
            ["without the system prompt", f"{result['ppl_sliding']:.2f}"],
            ["with it, not moved up to the window", f"{result['ppl_unrotated']:.2f}"],
        ],
    )
    yield ""
    yield (
        f"Device bytes {result['device_bytes_first']:,} when the window was full, {result['device_bytes_last']:,} at "
        f"the end; {result['ms_per_token_first']:.2f} and {result['ms_per_token_last']:.2f} ms a token; "
        f"{result['evictions']} evictions."
    )


def _agents(result: Result) -> Iterator[str]:
    columns = {"agentkv": result, "every turn from scratch": result.get("no_reuse")}
    if "against" in result:
        columns[f"{result['against']['model']} at {result['against']['url']}"] = result["against"]
    rows = [
        [
            name,
            f"{each['turns']}",
            f"{each['ttft_p50_s']:.3f} s",
            f"{each['ttft_p95_s']:.3f} s",
            f"{each['reused_share']:.1%}",
            f"{each['total_s']:.1f} s",
        ]
        for name, each in columns.items()
        if each
    ]
    yield f"{result['sessions']} agents, device memory for {result['device_budget_sessions']:g} of the longest."
    yield ""
    yield from _table(["", "turns", "first token, median", "95 %", "reused", "in all"], rows)


def _residency(result: Result) -> Iterator[str]:
    yield from _table(
        ["policy", "reused", "first token, median", "all first tokens", "restores"],
        [
            [
                f"`{name}`",
                f"{each['reused_share']:.1%}",
                f"{each['ttft_p50_s']:.3f} s",
                f"{each['ttft_sum_s']:.1f} s",
                ", ".join(f"{count} {source}" for source, count in sorted(each["restores"].items())),
            ]
            for name, each in result["policies"].items()
        ],
    )


def _codecs(result: Result) -> Iterator[str]:
    yield (
        f"{result['prefix_tokens']:,} tokens stored and restored, {result['lossy_tokens']:,} of them through the "
        f"codec; the next {result['scored_tokens']:,} scored."
    )
    yield ""
    yield from _table(
        ["codec", "times smaller", "mean KL, nats", "same likeliest token", "encode", "decode"],
        [
            [
                f"`{each['codec']}`",
                f"{each['ratio']:.2f}x",
                f"{each['mean_kl']:.5f}",
                f"{each['top1']:.1%}",
                f"{each['encode_mb_s']:,.0f} MB/s",
                f"{each['decode_mb_s']:,.0f} MB/s",
            ]
            for each in sorted(result["codecs"], key=lambda each: each["ratio"])
        ],
    )


def _http(result: Result) -> Iterator[str]:
    yield (
        f"First token {result['added_ttft_ms']:.2f} ms later than in process ({result['direct_ttft_ms']:.1f} ms "
        f"there), each later one {result['added_token_ms']:.3f} ms; medians over {result['turns']} turns, "
        f"{result['busy']} other conversations at work."
    )
