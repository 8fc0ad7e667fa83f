"""`agentkv bench …`: measurements against transformers in the same run, as one JSON line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["app"]

app = typer.Typer(
    help="Measure this machine: JSON with ratios against transformers in the same run.", no_args_is_help=True
)

Model = Annotated[str, typer.Option(help="Catalogue name, folder or Hugging Face id.")]
Home = Annotated[Path | None, typer.Option(help="Where the model is looked for; sessions go to a temporary folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on the last line, nothing else on stdout.")]
Quick = Annotated[bool, typer.Option(help="Fewer repetitions and shorter contexts: a smoke test, not a figure.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads for both sides; default: one a core.")]
Against = Annotated[
    str | None, typer.Option(help="Give the same traffic to an OpenAI-compatible server, by its URL up to /v1.")
]
AgainstModel = Annotated[str | None, typer.Option(help="What that server calls its model; default: its first.")]
AgainstKey = Annotated[
    str | None, typer.Option(envvar="AGENTKV_AGAINST_KEY", help="Its key.", show_envvar=True, show_default=False)
]


def _print(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result))
        return
    width = max(map(len, result))
    for key, value in result.items():
        typer.echo(f"{key:<{width}}  {value:.4g}" if isinstance(value, float) else f"{key:<{width}}  {value}")


def _run(work: Coroutine[Any, Any, dict[str, Any]], as_json: bool) -> None:
    _print(asyncio.run(work), as_json)


@app.command()
def resume(
    tokens: Annotated[int, typer.Option(help="Length of the conversation that sleeps.")] = 4096,
    model: Model = "smollm2-135m",
    home: Home = None,
    codec: Annotated[str, typer.Option(help="Codec of the stored KV.")] = "exact",
    dtype: Annotated[str, typer.Option(help="Dtype of weights and KV.")] = "bfloat16",
    threads: Threads = None,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """First token after a cold prefill, against first token after a resume from disk."""
    from agentkv.bench.resume import bench_resume

    tokens, rounds = (min(tokens, 1024), 1) if quick else (tokens, 5)
    _run(bench_resume(tokens, model, home, codec, dtype, threads, rounds), as_json)


@app.command()
def decode(
    sessions: Annotated[int, typer.Option(help="Conversations that generate at the same time.")] = 8,
    context: Annotated[int, typer.Option(help="Tokens that each of them holds.")] = 1024,
    model: Model = "smollm2-135m",
    home: Home = None,
    dtype: Annotated[str, typer.Option(help="Dtype of weights and KV.")] = "bfloat16",
    threads: Threads = None,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """Generated tokens a second over all sessions, against transformers' batched forward with a DynamicCache."""
    from agentkv.bench.decode import bench_decode

    _run(bench_decode(sessions, context, model, home, dtype, threads, quick), as_json)


@app.command()
def stream(
    policy: Annotated[str, typer.Option(help="Retention policy, e.g. sink:1024.")] = "sink:1024",
    tokens: Annotated[int, typer.Option(help="Tokens of text.")] = 50_000,
    model: Model = "smollm2-135m",
    home: Home = None,
    dtype: Annotated[str, typer.Option(help="Dtype of weights and KV.")] = "bfloat16",
    threads: Threads = None,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """Perplexity, bytes and time per token of a text that outgrows the window many times."""
    from agentkv.bench.stream import bench_stream

    _run(bench_stream(policy, tokens, model, home, dtype, threads, quick), as_json)


@app.command()
def agents(
    sessions: Annotated[int, typer.Option(help="Agents at work at the same time.")] = 64,
    turns: Annotated[int, typer.Option(help="Turns of each.")] = 6,
    device_budget: Annotated[float, typer.Option(help="Memory for live KV, in the longest session's worth.")] = 4,
    seed: Annotated[int, typer.Option(help="Of lengths, texts and gaps.")] = 0,
    kinds: Annotated[int, typer.Option(help="Kinds of agents; those of one kind share system prompt and tools.")] = 4,
    compression: Annotated[float, typer.Option(help="How much faster than real time the tools run.")] = 20,
    traces: Annotated[
        Path | None, typer.Option(help="Folder of OpenAI-format transcripts, replayed instead of made-up traffic.")
    ] = None,
    no_reuse: Annotated[bool, typer.Option("--no-reuse", help="Every turn computed from scratch.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Both, on the same traffic, with ratios.")] = False,
    residency: Annotated[
        str | None, typer.Option(help="Who leaves the device first: lru, lfu, ttl:600, cost; all: each in turn.")
    ] = None,
    hints: Annotated[bool, typer.Option("--hints", help="Agents say when they wait for a tool, and how long.")] = False,
    against: Against = None,
    against_model: AgainstModel = None,
    against_key: AgainstKey = None,
    model: Model = "smollm2-135m",
    home: Home = None,
    dtype: Annotated[str, typer.Option(help="Dtype of weights and KV.")] = "bfloat16",
    threads: Threads = None,
    quick: Annotated[bool, typer.Option(help="16 sessions of 2 kinds, 3 turns: a smoke test, not a figure.")] = False,
    as_json: Json = False,
) -> None:
    """First tokens of many agents that take turns, memory for a few of them; against a server without sessions."""
    from agentkv.bench.agents import bench_agents
    from agentkv.bench.traffic import Traffic

    if quick:
        sessions, turns, kinds = min(sessions, 16), min(turns, 3), min(kinds, 2)
    traffic = Traffic(sessions=sessions, turns=turns, kinds=kinds, compression=compression, seed=seed)
    servers: Any = "both" if compare else "scratch" if no_reuse else "sessions"
    _run(
        bench_agents(
            traffic,
            traces,
            device_budget,
            model,
            home,
            servers=servers,
            residency=residency,
            hints=hints,
            against=None if against is None else (against, against_model, against_key),
            dtype=dtype,
            threads=threads,
        ),
        as_json,
    )


@app.command()
def http(
    turns: Annotated[int, typer.Option(help="Turns on each side.")] = 20,
    tokens: Annotated[int, typer.Option(help="Tokens that each turn generates.")] = 48,
    busy: Annotated[int, typer.Option(help="Other conversations that generate meanwhile.")] = 2,
    model: Model = "smollm2-135m",
    home: Home = None,
    dtype: Annotated[str, typer.Option(help="Dtype of weights and KV.")] = "bfloat16",
    threads: Threads = None,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """What HTTP adds to the first token and to each later one, the client in another process, the model busy."""
    from agentkv.bench.http import bench_http

    _run(bench_http(turns, tokens, busy, model, home, dtype, threads, quick), as_json)


@app.command(name="all")
def everything(
    out: Annotated[Path, typer.Option(help="Folder for the JSON, the pictures and report.md.")],
    model: Model = "smollm2-135m",
    home: Home = None,
    dtype: Annotated[str, typer.Option(help="Dtype of weights and KV.")] = "bfloat16",
    threads: Threads = None,
    against: Against = None,
    against_model: AgainstModel = None,
    against_key: AgainstKey = None,
    quick: Annotated[bool, typer.Option(help="A smoke test, not figures. Without it, this takes long.")] = False,
) -> None:
    """All of them, one after the other, with pictures and a report in words."""
    from agentkv.bench.suite import Suite, run_suite
    from agentkv.cli.display import error_console

    server = None if against is None else (against, against_model, against_key)
    console = error_console()
    failed = asyncio.run(
        run_suite(
            Suite(model, home, dtype, threads, quick, server),
            out,
            say=lambda line: console.print(line, markup=False, highlight=False),
        )
    )
    typer.echo(out / "report.md")
    if failed:
        raise typer.Exit(1)
