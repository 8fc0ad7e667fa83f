"""What a real small model writes under a schema at temperature 1: what ends by itself validates, the rest says so."""

from __future__ import annotations

import asyncio
import datetime
import json
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field

from agentkv import AgentKV, Reply
from agentkv.sessions.session import Session

TOKENS = 128
"""Enough for most outputs of these schemas, and not for all."""

Word = Annotated[str, Field(max_length=16)]


class Person(BaseModel):
    name: Word
    age: Annotated[int, Field(ge=0, le=130)]
    role: Literal["admin", "guest", "user"]
    tags: Annotated[list[Word], Field(max_length=3)]
    email: str | None


class Meeting(BaseModel):
    when: datetime.datetime
    lasts: datetime.timedelta
    attendees: Annotated[list[Person], Field(min_length=1, max_length=2)]


class Circle(BaseModel):
    shape: Literal["circle"] = "circle"
    radius: Annotated[float, Field(gt=0, lt=10)]


class Box(BaseModel):
    shape: Literal["box"] = "box"
    sides: tuple[int, int, int]
    title: Annotated[str, Field(pattern=r"^[A-Z][a-z]{2,9}( [a-z]{2,9}){0,2}$")]


class Drawing(BaseModel):
    shapes: Annotated[list[Annotated[Circle | Box, Field(discriminator="shape")]], Field(min_length=1, max_length=3)]
    background: Literal["white", "black"] | None = None


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 20},
        "degrees": {"type": "number", "minimum": -60, "maximum": 60, "multipleOf": 0.5},
        "sky": {"enum": ["clear", "cloudy", "rain", None]},
        "hours": {"type": "array", "items": {"$ref": "#/$defs/hour"}, "minItems": 1, "maxItems": 4},
    },
    "required": ["city", "degrees", "sky", "hours"],
    "$defs": {"hour": {"type": "string", "format": "time"}},
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value", "children"],
        }
    },
    "$ref": "#/$defs/node",
}
CASES: dict[str, tuple[Any, str]] = {
    "person": (Person, "Invent a person."),
    "meeting": (Meeting, "Plan a meeting of two people next week."),
    "drawing": (Drawing, "Draw something."),
    "weather": (WEATHER, "How is the weather in Paris?"),
    "tree": (TREE, "Give me a small tree of numbers."),
}


@pytest.fixture
async def kv(smollm2_path: Path, tmp_path: Path) -> Any:
    async with AgentKV.open(model=str(smollm2_path), home=tmp_path, idle_seconds=3600, disk_margin=0) as runtime:
        yield runtime


async def answers(kv: AgentKV, case: str, seeds: range) -> list[Reply]:
    """One answer a seed, side by side."""
    schema, question = CASES[case]
    sessions: list[Session] = [await kv.sessions.create(system="You answer in JSON.") for _ in seeds]
    sampling: dict[str, Any] = {"schema": schema, "temperature": 1.0, "max_tokens": TOKENS}
    replies = await asyncio.gather(
        *[session.send(question, seed=seed, **sampling) for session, seed in zip(sessions, seeds, strict=True)]
    )
    for session in sessions:
        await session.delete()
    return replies


def check(case: str, reply: Reply) -> bool:
    """Whether it ended by itself. What did validates; what did not says so."""
    schema = CASES[case][0]
    if reply.finish_reason == "length":
        assert reply.parsed is None and reply.unparsed is not None and "cut after" in reply.unparsed
        return False
    assert reply.unparsed is None, (case, reply.seed, reply.text)
    if isinstance(schema, dict):
        Draft202012Validator(schema).validate(json.loads(reply.text))
        assert reply.parsed == json.loads(reply.text)
    else:
        assert reply.parsed == schema.model_validate_json(reply.text)
        Draft202012Validator(schema.model_json_schema()).validate(json.loads(reply.text))
    return True


async def test_eight_outputs_validate_or_say_that_they_were_cut(kv: AgentKV, seed: int) -> None:
    batches = await asyncio.gather(
        answers(kv, "person", range(seed, seed + 4)), answers(kv, "weather", range(seed, seed + 4))
    )
    ended = [check(case, reply) for case, batch in zip(("person", "weather"), batches, strict=True) for reply in batch]
    assert sum(ended) >= 6, "most end by themselves"
    assert len({reply.text for batch in batches for reply in batch}) == 8


@pytest.mark.full
@pytest.mark.timeout(3600)
async def test_two_hundred_outputs_that_end_by_themselves_validate(kv: AgentKV, seed: int) -> None:
    """Seeds from ``AGENTKV_TEST_SEED`` on, printed with what became of them."""
    ended: Counter[str] = Counter()
    cut: Counter[str] = Counter()
    first = 1000 * seed
    while ended.total() < 200:
        assert first < 1000 * seed + 400, "half of them end by themselves at least"
        for case in CASES:
            for reply in await answers(kv, case, range(first, first + 8)):
                (ended if check(case, reply) else cut)[case] += 1
        first += 8
    print(f"seeds {1000 * seed} to {first - 1}: ended {dict(ended)}, cut {dict(cut)}")
    assert all(ended[case] for case in CASES)


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_a_schema_costs_less_than_thirty_percent_of_the_tokens_a_second(kv: AgentKV) -> None:
    """Four sessions at temperature 1, in turn with and without, as many tokens each; the median of the ratios."""
    endless = {"type": "array", "items": Person.model_json_schema() | {"$defs": {}}, "minItems": 500}
    tokens = 64

    async def rate(**sampling: Any) -> float:
        sessions = [await kv.sessions.create(system="You answer in JSON.") for _ in range(4)]
        sampling |= {"temperature": 1.0, "max_tokens": tokens}
        replies = await asyncio.gather(
            *[session.send("Invent many people.", seed=i, **sampling) for i, session in enumerate(sessions)]
        )
        await kv.flush()
        assert {len(reply.ids) for reply in replies} == {tokens}
        return sum((tokens - 1) / (reply.seconds - reply.ttft_seconds) for reply in replies)

    await rate(schema=endless)
    pairs = [(await rate(schema=endless), await rate(ignore_eos=True)) for _ in range(5)]
    ratio = median(constrained / free for constrained, free in pairs)
    print(f"tokens a second, with and without: {pairs}; ratio {ratio:.3f}")
    assert ratio >= 0.7
