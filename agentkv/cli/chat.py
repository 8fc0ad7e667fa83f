"""``agentkv chat``: a conversation in the terminal that can be gone on with on another day."""

from __future__ import annotations

import shlex
import sys
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentkv.cli.display import nbytes, out_console, seconds
from agentkv.cli.options import Device, Dtype, HomeFolder, Model, Policy, settings_from
from agentkv.errors import AgentKVError, InvalidRequest

if TYPE_CHECKING:
    from agentkv.cli.background import BackgroundLoop
    from agentkv.schemas.replies import Reply
    from agentkv.sessions.runtime import AgentKV
    from agentkv.sessions.session import Session

__all__ = ["chat"]

_HELP = """/info  where this session is and what it weighs
/help  this
/exit  leave (so does the end of input); the conversation stays
Ctrl-C while the model answers takes that turn back; at the prompt it leaves."""


def chat(
    session: Annotated[str | None, typer.Option("--session", help="Go on with this session.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="System prompt of a new session.")] = None,
    model: Model = None,
    home: HomeFolder = None,
    device: Device = None,
    dtype: Dtype = None,
    policy: Policy = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Longest reply, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="0 to 2; without it: greedy.")] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", help="Nucleus sampling.")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", help="Only the k likeliest tokens.")] = None,
    min_p: Annotated[float | None, typer.Option("--min-p", help="Least relative probability.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option("--repetition-penalty", help="Above 1: fewer.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Same seed, same session: same output.")] = None,
) -> None:
    """Talk to a model. The session is kept: go on with it by its id, today or days later."""
    from agentkv.cli.background import BackgroundLoop
    from agentkv.cli.pulling import pull_shown
    from agentkv.cli.stored import settings_of_session
    from agentkv.policies.retention import parse_policy
    from agentkv.schemas.sampling import SamplingParams
    from agentkv.sessions.runtime import AgentKV

    if session is not None and system is not None:
        raise InvalidRequest("the system prompt was frozen when the session was created: drop --system or --session")
    settings = settings_from(home=home, model=model, device=device, dtype=dtype)
    parse_policy(policy or settings.default_policy)
    sampling = {
        "max_tokens": max_tokens or settings.max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
    }
    SamplingParams.build(**sampling)
    with BackgroundLoop() as loop:
        if session is not None and model is None:
            settings = loop.run(settings_of_session(settings, session))
        pull_shown(settings.model, settings)
        kv = AgentKV(settings)
        try:
            loop.run(_open(kv))
            talk = _Talk(loop, kv, loop.run(_session(kv, session, system, policy)), sampling)
            talk.greet(new=session is None)
            try:
                talk.run()
            finally:
                talk.part([("--home", str(home) if home else None), ("--model", model)])
        finally:
            loop.run(kv.close())


async def _open(kv: AgentKV) -> None:
    await kv


async def _session(kv: AgentKV, session_id: str | None, system: str | None, policy: str | None) -> Session:
    if session_id is None:
        return await kv.sessions.create(system=system, policy=policy)
    session = await kv.sessions.get(session_id)
    if policy is not None:
        await session.set_policy(policy)
    return session


class _Talk:
    """The main thread's side: reads lines, shows replies."""

    def __init__(self, loop: BackgroundLoop, kv: AgentKV, session: Session, sampling: dict[str, Any]) -> None:
        self._loop = loop
        self._kv = kv
        self._session = session
        self._sampling = sampling
        self._out = out_console()

    def _note(self, text: str) -> None:
        self._out.print(text, style="dim", markup=False, soft_wrap=True)

    def greet(self, *, new: bool) -> None:
        """What was opened; of an earlier conversation, its last words."""
        model = self._kv.model
        self._note(
            f"session {self._session.id}  ({model.name}, {model.adapter.geometry.dtype}, {model.adapter.device})"
        )
        self._note("/help shows the commands")
        if new:
            return
        items = self._loop.run(self._session.items())
        for item in items[-2:]:
            self._note(f"{item.role}: {item.text}")

    def part(self, options: list[tuple[str, str | None]]) -> None:
        """How to come back."""
        given = "".join(f" {name} {shlex.quote(value)}" for name, value in options if value)
        self._note(f"to go on: agentkv chat --session {self._session.id}{given}")

    def run(self) -> None:
        """Until the input ends, ``/exit``, or Ctrl-C at the prompt."""
        terminal = sys.stdin.isatty()
        if terminal:
            with suppress(ImportError):
                import readline  # noqa: F401
        while True:
            try:
                line = input("> " if terminal else "").strip()
            except (EOFError, KeyboardInterrupt):
                if terminal:
                    self._out.print()
                return
            if line in ("/exit", "/quit"):
                return
            if line == "/help":
                self._note(_HELP)
            elif line == "/info":
                self._info()
            elif line.startswith("/"):
                self._note(f"{line.split()[0]} is no command here; /help shows them")
            elif line:
                self._turn(line)

    def _turn(self, line: str) -> None:
        before = self._loop.run(self._session.state()).turns
        try:
            reply = self._loop.run(self._stream(line))
        except KeyboardInterrupt:
            kept = self._loop.run(self._session.state()).turns > before
            self._note(
                "\n(too late to cancel: this turn is kept)" if kept else "\n(cancelled: this turn was taken back)"
            )
        except AgentKVError as error:
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        else:
            self._out.print()
            self._note(_summary(reply))

    async def _stream(self, line: str) -> Reply:
        from agentkv.schemas.replies import Done

        reply = None
        async with aclosing(self._session.stream(line, **self._sampling)) as events:
            async for event in events:
                sys.stdout.write(event.text)
                sys.stdout.flush()
                if isinstance(event, Done):
                    reply = event.reply
        assert reply is not None
        return reply

    def _info(self) -> None:
        info = self._loop.run(self._session.state())
        self._note(
            f"{info.id}: {info.turns} turns, {info.ledger_tokens:,} tokens of at most "
            f"{self._kv.model.context_limit:,}; {info.state}, {nbytes(info.device_bytes)} on the device, "
            f"{info.stored_tokens:,} tokens on disk in {nbytes(info.disk_bytes)} ({info.idle_codec})"
        )


def _summary(reply: Reply) -> str:
    usage, restore = reply.usage, reply.restore
    decoding = reply.seconds - reply.ttft_seconds
    parts = [
        f"{usage.cached_tokens:,} of {usage.prompt_tokens:,} prompt tokens reused",
        f"first token {seconds(reply.ttft_seconds)}",
    ]
    if usage.completion_tokens > 1 and decoding > 0:
        parts.append(f"{(usage.completion_tokens - 1) / decoding:.1f} tokens/s")
    if restore.source not in ("device", "new"):
        codec = f" ({restore.codec})" if restore.codec else ""
        parts.append(f"KV from {restore.source}{codec} in {seconds(restore.seconds)}")
    else:
        parts.append(f"KV from {restore.source}" if restore.source == "device" else "new KV")
    if restore.reason:
        parts.append(f"{restore.recomputed_tokens:,} tokens recomputed: {restore.reason}")
    if reply.finish_reason == "length":
        parts.append("cut at the token limit")
    return f"[{' · '.join(parts)}]"
