"""Replies that follow a schema: what ends by itself validates, what is cut says so, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from homes import chat_folder, check_session, model_folder, opened
from jsonschema import Draft202012Validator
from llguidance import LLParserLimits
from pydantic import BaseModel, Field, field_validator

from agentkv import AgentKV, Done, Reply, TextDelta
from agentkv.errors import InvalidRequest, SessionBusy
from agentkv.schemas.constraints import Constraint
from agentkv.sessions.session import Session


class Place(BaseModel):
    name: Annotated[str, Field(max_length=6)]
    kind: Literal["town", "river"]
    size: Annotated[int, Field(ge=0, le=99)]
    near: Annotated[list[Annotated[str, Field(max_length=3)]], Field(max_length=2)]


POINT = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 999}}, "required": ["x"]}
LONG = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 60, "maxItems": 60}
QUESTION = "How is the weather in Paris?"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
async def kv(models: Path, tmp_path: Path) -> Any:
    async with opened(tmp_path / "home", chat_folder(models), max_tokens=300) as runtime:
        yield runtime


async def asked(kv: AgentKV, **sampling: Any) -> Reply:
    session = await kv.sessions.create(system="You answer in JSON.")
    return await session.send(QUESTION, **sampling)


@pytest.mark.parametrize("seed", range(4))
async def test_a_class_gives_an_object_of_that_class(kv: AgentKV, seed: int) -> None:
    reply = await asked(kv, schema=Place, temperature=1.0, seed=seed)
    assert reply.finish_reason == "stop" and reply.unparsed is None
    assert isinstance(reply.parsed, Place)
    assert reply.parsed == Place.model_validate_json(reply.text)


async def test_a_json_schema_gives_plain_json(kv: AgentKV) -> None:
    for sampling in ({"schema": POINT}, {"response_format": {"type": "json_schema", "json_schema": {"schema": POINT}}}):
        reply = await asked(kv, **sampling)
        assert reply.parsed == json.loads(reply.text) and reply.parsed.keys() == {"x"}
        assert reply.text == json.dumps(reply.parsed), "on one line, as Python writes it"


async def test_without_a_schema_nothing_is_parsed_and_nothing_changes(kv: AgentKV) -> None:
    plain, text = [await asked(kv, max_tokens=9, **more) for more in ({}, {"response_format": {"type": "text"}})]
    assert (plain.parsed, plain.unparsed) == (None, None)
    assert plain.ids == text.ids


async def test_an_expression_or_a_grammar_constrains_as_well(kv: AgentKV) -> None:
    yes = await asked(kv, constraint=Constraint.regex("(yes|no), (yes|no)"), temperature=2.0, seed=1)
    assert yes.parsed == yes.text and set(yes.text.split(", ")) <= {"yes", "no"}
    rule = Constraint.rule(POINT)
    call = await asked(kv, constraint=Constraint.grammar(f'start: "<c>" p "</c>"\np: {rule}'), temperature=1.0, seed=2)
    assert json.loads(call.text.removeprefix("<c>").removesuffix("</c>")).keys() == {"x"}


async def test_an_output_that_is_cut_says_so(kv: AgentKV) -> None:
    reply = await asked(kv, schema=LONG, max_tokens=5, temperature=1.0, seed=0)
    assert reply.finish_reason == "length" and reply.parsed is None
    assert reply.unparsed is not None and "cut after 5 tokens" in reply.unparsed and "max_tokens" in reply.unparsed


async def test_an_output_that_is_whole_with_the_last_allowed_token_was_not_cut(kv: AgentKV) -> None:
    whole = await asked(kv, schema=POINT)
    again = await asked(kv, schema=POINT, max_tokens=len(whole.ids))
    assert again.ids == whole.ids
    assert (again.finish_reason, again.parsed) == ("stop", whole.parsed)


@pytest.mark.parametrize("cuts", [[1], [7], [2, 3], [1, 1, 1, 4]])
async def test_cut_and_continued_it_is_the_output_that_it_would_have_been(kv: AgentKV, cuts: list[int]) -> None:
    whole = await asked(kv, schema=Place)
    session = await kv.sessions.create(system="You answer in JSON.")
    replies = [await session.send(QUESTION, schema=Place, max_tokens=cuts[0])]
    replies += [await session.continue_(schema=Place, max_tokens=cut) for cut in cuts[1:]]
    assert all(reply.parsed is None for reply in replies)
    replies.append(await session.continue_(schema=Place))
    assert tuple(token for reply in replies for token in reply.ids) == whole.ids
    assert replies[-1].parsed == whole.parsed is not None


async def test_continuing_where_the_cut_reply_breaks_the_schema_is_refused_and_leaves_everything(kv: AgentKV) -> None:
    session = await kv.sessions.create()
    await session.send(QUESTION, max_tokens=6, constraint=Constraint.regex("abcdefgh"))
    before = await session.token_ids()
    with pytest.raises(InvalidRequest, match="does not follow this schema"):
        await session.continue_(schema=POINT)
    assert await session.token_ids() == before
    done = await session.continue_(constraint=Constraint.regex("abcdefgh"))
    assert done.parsed == "abcdefgh"


async def test_an_answer_to_appended_messages_begins_anew(kv: AgentKV) -> None:
    session = await kv.sessions.create()
    await session.send(QUESTION, max_tokens=3)
    await session.append("user: again")
    assert (await session.continue_(schema=POINT)).parsed is not None


async def test_a_stop_string_that_cuts_it_is_told(kv: AgentKV) -> None:
    reply = await asked(kv, schema=LONG, stop=[","], temperature=1.0, seed=0)
    assert (reply.finish_reason, reply.parsed) == ("stop", None)
    assert reply.unparsed is not None and "stop string" in reply.unparsed


async def test_what_only_a_validator_knows_is_told(kv: AgentKV) -> None:
    class Never(BaseModel):
        word: Literal["a", "b"]

        @field_validator("word")
        @classmethod
        def _no(cls, value: str) -> str:
            raise ValueError("never good enough")

    reply = await asked(kv, schema=Never)
    assert reply.parsed is None and reply.unparsed is not None
    assert "Never refused word" in reply.unparsed and "never good enough" in reply.unparsed
    assert json.loads(reply.text)["word"] in ("a", "b"), "the turn is committed all the same"


async def test_the_conversation_goes_on_after_it(kv: AgentKV) -> None:
    session = await kv.sessions.create()
    await session.send(QUESTION, schema=POINT)
    await session.send("And in Rome?", schema=Place, temperature=1.0, seed=1)
    said = kv.model.tokenizer.decode(await session.token_ids())
    assert "}<|im_end|>\n<|im_start|>user\nAnd in Rome?<|im_end|>\n<|im_start|>assistant\n{" in said
    await check_session(kv, session)
    await session.suspend()
    assert (await session.send("And in Oslo?", schema=POINT)).parsed is not None


async def test_the_text_streams_as_ever(kv: AgentKV) -> None:
    session = await kv.sessions.create()
    events = [event async for event in session.stream(QUESTION, schema=Place, temperature=1.0, seed=3)]
    assert all(isinstance(event, TextDelta) for event in events[:-1]) and len(events) > 3
    done = events[-1]
    assert isinstance(done, Done) and done.reply.parsed is not None
    assert "".join(event.text for event in events) == done.reply.text


# -- among others -----------------------------------------------------------------------------------------------------


async def test_constrained_and_free_sessions_in_one_step_do_not_show_in_one_another(kv: AgentKV) -> None:
    requests: list[dict[str, Any]] = [
        {"schema": Place, "temperature": 1.0, "seed": 1},
        {"max_tokens": 40, "temperature": 1.0, "seed": 2},
        {"schema": POINT, "temperature": 0.7, "top_p": 0.5, "seed": 3},
        {"schema": Place, "temperature": 1.3, "seed": 4},
        {"max_tokens": 30},
        {"schema": LONG, "max_tokens": 25, "temperature": 1.0, "seed": 5},
        {"constraint": Constraint.regex("[a-f]{30}"), "repetition_penalty": 1.3},
        {"schema": Place, "temperature": 1.0, "seed": 6, "logprobs": 2},
    ]
    alone = [(await asked(kv, **request)) for request in requests]
    steps = kv.model.engine.steps
    together = await asyncio.gather(*[asked(kv, **request) for request in requests])
    assert kv.model.engine.steps - steps < sum(len(reply.ids) for reply in together) / 2, "they shared steps"
    assert [reply.ids for reply in together] == [reply.ids for reply in alone]
    assert [reply.parsed for reply in together] == [reply.parsed for reply in alone]


async def test_a_cancelled_turn_leaves_nothing_of_its_grammar(kv: AgentKV) -> None:
    session = await kv.sessions.create(system="You answer in JSON.")
    before, expected = await session.token_ids(), await asked(kv, schema=Place, temperature=1.0, seed=8)
    for deltas in (1, 4):
        async with aclosing(session.stream(QUESTION, schema=LONG, temperature=1.0, seed=1)) as events:
            seen = 0
            async for event in events:
                seen += isinstance(event, TextDelta)
                if seen == deltas:
                    break
    task = asyncio.create_task(session.send(QUESTION, schema=LONG, temperature=1.0, seed=1, wait=True))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await session.token_ids() == before
    reply = await session.send(QUESTION, schema=Place, temperature=1.0, seed=8, wait=True)
    assert reply.ids == expected.ids and reply.parsed == expected.parsed
    await check_session(kv, session)


async def test_branches_of_one_session_have_grammars_of_their_own(kv: AgentKV) -> None:
    session = await kv.sessions.create()
    branches = await session.sample(QUESTION, n=4, schema=Place, temperature=1.5, seed=1)
    replies = [branch.reply for branch in branches if branch.reply is not None]
    assert len(replies) == 4 and len({reply.text for reply in replies}) > 1
    assert all(isinstance(reply.parsed, Place) for reply in replies)
    again = await branches[0].session.regenerate(schema=POINT)
    assert again.parsed is not None and again.parsed.keys() == {"x"}


async def test_a_continuation_that_is_made_again_goes_on_from_the_same_cut(kv: AgentKV) -> None:
    session = await kv.sessions.create()
    await session.send(QUESTION, schema=Place, max_tokens=4, temperature=1.0, seed=1)
    first = await session.continue_(schema=Place, temperature=1.0, seed=2)
    again = await session.regenerate(schema=Place, temperature=1.0, seed=2)
    assert again.ids == first.ids and again.parsed == first.parsed is not None


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"tags": {"type": "array", "uniqueItems": True}}}, "'uniqueItems' at #/properties/tags"),
        ({"properties": {"a": {"type": "string", "pattern": "(?<!x)y"}}}, "#/properties/a: .*look-around"),
        ({"items": {"oneOf": [{"type": "integer"}, {"minimum": 3}]}, "type": "array"}, "#/items: oneOf"),
    ],
    ids=str,
)
async def test_what_a_grammar_cannot_follow_is_refused_before_anything_happens(
    kv: AgentKV, schema: dict[str, Any], words: str
) -> None:
    session = await kv.sessions.create()
    await session.send(QUESTION, max_tokens=2)
    before = await session.token_ids()
    computed = kv.model.engine.computed_tokens
    with pytest.raises(InvalidRequest, match=words) as caught:
        await session.send("And?", schema=schema)
    assert caught.value.param == "schema"
    assert await session.token_ids() == before and kv.model.engine.computed_tokens == computed
    assert (await session.send("And?", schema=POINT)).parsed is not None


async def test_a_grammar_that_fails_on_its_way_rolls_its_own_turn_back(
    kv: AgentKV, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    session = await kv.sessions.create()
    await session.send(QUESTION, max_tokens=2)
    before = await session.token_ids()
    with monkeypatch.context() as patched:
        patched.setattr(
            "agentkv.engine.grammars.limits", lambda: LLParserLimits(step_lexer_fuel=50, verbose_errors=False)
        )
        caplog.set_level(logging.DEBUG)
        schema = {"type": "string", "pattern": "^(secret.{0,99}b){9}$"}
        other = await kv.sessions.create()
        async with aclosing(other.stream(QUESTION, max_tokens=250, ignore_eos=True, temperature=1.0, seed=1)) as events:
            await anext(events)
            with pytest.raises(InvalidRequest, match="takes more work than is allowed"):
                await session.send("And?", schema=schema)
            assert (await other.state()).busy, "it was in the same step"
            rest = [event async for event in events]
    assert isinstance(rest[-1], Done) and rest[-1].reply.usage.completion_tokens == 250
    assert await session.token_ids() == before
    await check_session(kv, session)
    assert "secret" not in caplog.text


async def test_the_schema_is_in_no_log(kv: AgentKV, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    reply = await asked(kv, schema={"type": "object", "properties": {"a": {"enum": ["secret", 1]}}, "required": ["a"]})
    with pytest.raises(InvalidRequest):
        await asked(kv, schema={"const": "secret", "type": "string", "pattern": "("})
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("agentkv")]
    assert reply.parsed is not None and ours and not [line for line in ours if "secret" in line]


async def test_a_turn_of_tokens_can_follow_a_schema_too(kv: AgentKV) -> None:
    session = await kv.sessions.create()
    reply = await session.generate_tokens([5, 6, 7], schema=POINT)
    assert reply.text == "" and reply.parsed.keys() == {"x"}
    Draft202012Validator(POINT).validate(reply.parsed)


async def test_a_model_without_a_tokenizer_says_that_it_cannot(models: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "home", model_folder(models)) as kv:
        session = await kv.sessions.create()
        with pytest.raises(InvalidRequest, match="no tokenizer") as caught:
            await session.generate_tokens([1, 2], schema=POINT)
        assert caught.value.param == "schema"


async def test_the_tables_are_made_at_first_use_or_when_the_runtime_opens(models: Path, tmp_path: Path) -> None:
    for prepared in (False, True):
        async with opened(tmp_path / str(prepared), chat_folder(models), prepare_schemas=prepared) as kv:
            assert ("_tables" in vars(kv.model.grammars)) is prepared
            assert (await asked(kv, schema=POINT, max_tokens=99)).parsed is not None
            assert "_tables" in vars(kv.model.grammars)


async def test_beams_and_schemas_do_not_go_together(kv: AgentKV) -> None:
    with pytest.raises(InvalidRequest, match="a beam search takes no constraint"):
        await asked(kv, schema=POINT, beams=2)


async def test_a_second_turn_is_refused_as_ever(kv: AgentKV) -> None:
    session: Session = await kv.sessions.create()
    first = asyncio.create_task(session.send(QUESTION, schema=LONG))
    await asyncio.sleep(0)
    with pytest.raises(SessionBusy):
        await session.send("And?", schema=POINT)
    assert len((await first).parsed) == 60
