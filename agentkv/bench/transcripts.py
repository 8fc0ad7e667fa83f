"""Recorded conversations of agents, in OpenAI's chat format, as traffic."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from agentkv.bench.traffic import Conversation, Traffic, Turn, gap_of
from agentkv.errors import InvalidRequest
from agentkv.schemas.messages import normalise

__all__ = ["Transcript", "read_transcripts", "replayed"]


@dataclass(frozen=True, slots=True)
class Transcript:
    """``exchanges``: what the world said, and the assistant's answer to it as text, calls included."""

    name: str
    system: str | None
    tools: tuple[Mapping[str, Any], ...]
    exchanges: tuple[tuple[tuple[Mapping[str, Any], ...], str], ...]


def read_transcripts(folder: Path) -> list[Transcript]:
    """All ``*.json`` of a folder, in order of name: an object with ``messages`` (and perhaps ``tools``), or their list.

    ``InvalidRequest`` names the file that is none, or the folder that holds none.
    """
    files = sorted(folder.glob("*.json"))
    if not files:
        raise InvalidRequest(f"{folder} holds no transcript: *.json files with OpenAI-style messages", param="traces")
    return [_read(file) for file in files]


def _read(file: Path) -> Transcript:
    try:
        recorded = json.loads(file.read_text(encoding="utf-8"))
        whole = {"messages": recorded} if isinstance(recorded, list) else recorded
        messages = list(whole["messages"])
        tools = tuple(whole.get("tools") or ())
        normalise(messages)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"{file} is no transcript: {type(error).__name__}: {error}", param="traces") from error
    system = None
    if messages[0]["role"] in ("system", "developer"):
        system = normalise(messages.pop(0))[0].text
    exchanges: list[tuple[tuple[Mapping[str, Any], ...], str]] = []
    said: list[Mapping[str, Any]] = []
    for message in messages:
        if message["role"] != "assistant":
            said.append(message)
        elif said:
            exchanges.append((tuple(said), _spoken(message)))
            said = []
    if not exchanges:
        raise InvalidRequest(f"{file} is no transcript of an agent: nobody is answered in it", param="traces")
    return Transcript(file.stem, system, tools, tuple(exchanges))


def _spoken(message: Mapping[str, Any]) -> str:
    checked = normalise(message)[0]
    calls = [json.dumps(call.canonical(), ensure_ascii=False) for call in checked.tool_calls]
    return "\n".join([checked.text, *calls])


def replayed(transcripts: Sequence[Transcript], traffic: Traffic, count: Callable[[str], int]) -> list[Conversation]:
    """``traffic.sessions`` conversations, one transcript after the other, each at most ``traffic.turns`` turns long.

    What the world said is as recorded; the agent's answers are as long as the recorded ones (``count``: tokens of a
    text), in the model's own words. How long the tools took is not recorded: gaps are drawn as in made traffic.
    """
    made = []
    for index in range(traffic.sessions):
        kind = index % len(transcripts)
        transcript = transcripts[kind]
        random, gap = Random(f"{traffic.seed}/session/{index}"), gap_of(traffic, kind)
        turns = tuple(
            Turn(random.expovariate(1 / gap) if gap else 0.0, messages, max(1, count(answer)))
            for messages, answer in transcript.exchanges[: traffic.turns]
        )
        made.append(Conversation(transcript.name, transcript.system, transcript.tools, gap, turns))
    return made
