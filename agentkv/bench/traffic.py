"""Agent-like traffic, drawn from a seed: who calls, how much a tool says, how long it takes.

agent    ┌ system prompt + tools ┐   shared by all agents of a kind
a turn   [ what the world says: a task, then tool results ][ a short answer ]   then the tool runs: a gap
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from agentkv.errors import InvalidRequest

__all__ = ["Conversation", "Traffic", "Turn", "gap_of", "written"]

_LEAST = 8
"""Tokens of the shortest tool result."""
_PACES = (0.25, 0.5, 1.0, 2.0)
"""Mean gaps of one kind of agent after the other, in parts of ``gap_seconds``: some tools are quick, some are slow."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is drawn. Lengths in tokens, about; times in seconds.

    ``head_tokens`` of system prompt open every session, the kind's tool definitions on top of them. The median and the
    sigma (of the logarithm) of tool results, and the head, are those of eight transcripts that the SWE-agent project
    publishes; longer results than ``result_most_tokens`` are cut, as agents do. Gaps are exponential, their mean is
    ``gap_seconds`` times the kind's pace, and they pass ``compression`` times as fast as real ones. At most
    ``in_flight`` turns run at a time.
    """

    sessions: int = 64
    turns: int = 6
    kinds: int = 4
    head_tokens: int = 1200
    result_median_tokens: int = 190
    result_sigma: float = 1.1
    result_most_tokens: int = 1024
    answer_tokens: int = 16
    gap_seconds: float = 300.0
    compression: float = 20.0
    in_flight: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("sessions", "turns", "kinds", "head_tokens", "result_median_tokens", "answer_tokens", "in_flight"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} must be at least 1, got {getattr(self, name)}", param=name)
        if self.compression <= 0 or self.gap_seconds < 0:
            raise InvalidRequest(
                f"gaps of {self.gap_seconds} s, {self.compression} times as fast, cannot be waited for",
                param="compression",
            )


@dataclass(frozen=True, slots=True)
class Turn:
    """``gap_seconds`` after the last answer the world says ``messages``, and the agent generates an answer."""

    gap_seconds: float
    messages: tuple[Mapping[str, Any], ...]
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """One agent's work. ``usual_gap``: what its tools take on average, in the same seconds as the turns' gaps."""

    kind: str
    system: str | None
    tools: tuple[Mapping[str, Any], ...]
    usual_gap: float
    turns: tuple[Turn, ...]


def gap_of(traffic: Traffic, kind: int) -> float:
    """Mean gap of a kind of agent, compressed."""
    return traffic.gap_seconds * _PACES[kind % len(_PACES)] / traffic.compression


def written(traffic: Traffic, text: Callable[[int, int], str]) -> list[Conversation]:
    """The traffic, in words. ``text(place, tokens)``: so much running text from some place on; the same for the same.

    Each session draws from a seed of its own: more sessions leave the others as they are.
    """
    heads = [_head(traffic, kind, text) for kind in range(traffic.kinds)]
    made = []
    for index in range(traffic.sessions):
        kind = index % traffic.kinds
        name, system, tools = heads[kind]
        turns = tuple(_turns(traffic, index, gap_of(traffic, kind), text))
        made.append(Conversation(name, system, tools, gap_of(traffic, kind), turns))
    return made


def _head(
    traffic: Traffic, kind: int, text: Callable[[int, int], str]
) -> tuple[str, str, tuple[Mapping[str, Any], ...]]:
    name = f"agent-{kind}"
    rules = text(Random(f"{traffic.seed}/head/{kind}").randrange(2**31), traffic.head_tokens)
    tools = tuple(
        {
            "type": "function",
            "function": {
                "name": f"{verb}_{kind}",
                "description": f"{verb} what is named, and return what is there.",
                "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
            },
        }
        for verb in ("read", "run")
    )
    return name, f"You are {name} and work by these rules.\n\n{rules}", tools


def _turns(traffic: Traffic, index: int, gap: float, text: Callable[[int, int], str]) -> Iterator[Turn]:
    random = Random(f"{traffic.seed}/session/{index}")
    for turn in range(traffic.turns):
        pause = random.expovariate(1 / gap) if gap else 0.0
        drawn = random.lognormvariate(math.log(traffic.result_median_tokens), traffic.result_sigma)
        tokens = min(max(round(drawn), _LEAST), max(_LEAST, traffic.result_most_tokens))
        content = text(random.randrange(2**31), tokens)
        result = {"role": "tool", "tool_call_id": f"call_{turn}", "content": content}
        message = result if turn else {"role": "user", "content": content}
        yield Turn(pause, (message,), traffic.answer_tokens)
