"""Compiled grammars: once for all outputs, one state for each; what cannot be compiled is named with its place."""

from __future__ import annotations

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from homes import byte_tokenizer
from llguidance import LLParserLimits
from tokenizers import Tokenizer, models
from walking import END, WIDTH, grammars, tokens_of, walk, walked

from agentkv.engine.grammars import Grammars
from agentkv.engine.sampling import Sampler, choose
from agentkv.errors import EngineFailed, InvalidRequest, Unsupported
from agentkv.schemas.constraints import Constraint
from agentkv.schemas.sampling import SamplingParams

CPU = torch.device("cpu")
POINT = Constraint.json({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]})


def accepts(constraint: Constraint, text: str) -> bool:
    """Whether the text is a whole output."""
    matcher = grammars().start(constraint)
    for token in tokens_of(text):
        if matcher.finished or not matcher.allowed()[token]:
            return False
        matcher.advance(token)
    return matcher.finished or bool(matcher.allowed()[END])


def test_only_one_form_of_white_space_is_allowed() -> None:
    assert accepts(POINT, '{"x": 1}')
    assert not any(accepts(POINT, text) for text in ('{"x":1}', '{"x":  1}', '{ "x": 1}', '{\n"x": 1}', '{"x": 1} '))


def test_the_mask_has_a_column_for_each_logit_and_allows_nothing_beyond_the_tokenizer() -> None:
    mask = grammars().start(Constraint.regex("(?s:.*)")).allowed()
    assert mask.shape == (WIDTH,) and mask.dtype == torch.bool
    tokenizer = byte_tokenizer()
    specials = {tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens}
    allowed = {int(token) for token in mask.nonzero()}
    assert END in allowed, "an end is allowed where the output may be whole"
    assert not (specials - {END}) & allowed and max(allowed) < len(tokenizer), "no control token is text"


def test_an_output_ends_by_itself_or_by_an_end_token() -> None:
    closed = grammars().start(POINT)
    for token in tokens_of('{"x": 1}'):
        assert not closed.finished
        closed.advance(token)
    assert closed.finished, "nothing can follow"
    with pytest.raises(EngineFailed, match="finished"):
        closed.allowed()

    open_ended = grammars().start(Constraint.json({"type": "integer"}))
    open_ended.advance(tokens_of("7")[0])
    assert not open_ended.finished and open_ended.allowed()[END], "another digit could follow"
    open_ended.advance(END)
    assert open_ended.finished


def test_a_token_that_is_not_allowed_is_an_error() -> None:
    with pytest.raises(EngineFailed, match=r"token \d+ was chosen where the schema does not allow it"):
        grammars().start(POINT).advance(tokens_of("x")[0])


def test_a_token_is_taken_only_once_the_mask_that_is_under_way_is_there() -> None:
    ours, gate = Grammars(byte_tokenizer(), WIDTH, [END]), threading.Event()
    ours.warm()
    ours._workers.submit(gate.wait, 30)
    matcher = ours.start(POINT)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(matcher.advance, tokens_of("{")[0])
        with pytest.raises(TimeoutError):
            taken.result(0.2)
        gate.set()
        taken.result(30)
    assert not matcher.finished and matcher.allowed().any()


def test_a_copy_goes_its_own_way() -> None:
    first = grammars().start(Constraint.regex("a(b|c)d"))
    first.advance(tokens_of("a")[0])
    twin = first.copy()
    first.advance(tokens_of("b")[0])
    assert twin.allowed()[tokens_of("c")[0]] and not first.allowed()[tokens_of("c")[0]]
    twin.advance(tokens_of("c")[0])
    first.advance(tokens_of("d")[0])
    assert first.finished and not twin.finished


def test_an_output_goes_on_from_what_was_said() -> None:
    said = tokens_of('{"x": 1')
    assert json.loads(grammars().text([*said, *walk(grammars().start(POINT, said), 3)]))["x"] >= 1
    with pytest.raises(InvalidRequest, match="does not follow this schema"):
        grammars().start(POINT, tokens_of("[1"))
    with pytest.raises(InvalidRequest, match="whole already"):
        grammars().start(POINT, tokens_of('{"x": 1}'))


def test_a_schema_is_compiled_once_however_many_begin_together(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Grammars(byte_tokenizer(), WIDTH, [END])
    compiled: list[str] = []
    compile_ = ours._compile
    gate = threading.Event()

    def counted(constraint: Constraint) -> Any:
        gate.wait(10)
        compiled.append(constraint.digest)
        return compile_(constraint)

    monkeypatch.setattr(ours, "_compile", counted)
    with ThreadPoolExecutor(8) as pool:
        started = [pool.submit(ours.start, POINT) for _ in range(8)]
        gate.set()
        matchers = [each.result() for each in started]
    assert len(compiled) == 1 and len({id(matcher) for matcher in matchers}) == 8
    texts = {ours.text(list(walk(matcher, seed))) for seed, matcher in enumerate(matchers)}
    assert len(texts) > 1 and all(POINT.parse(text) for text in texts), "each has a state of its own"


def test_a_failed_compilation_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Grammars(byte_tokenizer(), WIDTH, [END])
    with monkeypatch.context() as patched:
        patched.setattr(ours, "_compile", lambda constraint: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ours.start(POINT)
    assert ours.start(POINT).allowed().any()


def test_no_more_than_so_many_grammars_are_kept() -> None:
    ours = Grammars(byte_tokenizer(), WIDTH, [END])
    for index in range(70):
        ours.start(Constraint.json({"const": index}))
    assert len(ours._compiled) == 64
    assert Constraint.json({"const": 0}).digest not in ours._compiled


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"items": {"pattern": "(?=x)y", "type": "string"}}}}, "#/properties/a/items: .*look-a"),
        ({"$defs": {"p": {"type": "string", "pattern": "("}}, "properties": {"a": {"$ref": "#/$defs/p"}}}, "unclosed"),
        ({"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}}, "#/properties/a: oneOf"),
        (
            {"type": "array", "minItems": 1, "prefixItems": [{"type": "string", "minLength": 1, "maxLength": 0}]},
            "#/p.*/0",
        ),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "#: .*'a' is unsatisfiable"),
        (False, "# is false"),
        ({"anyOf": [False, {"enum": [1], "type": "string"}]}, "#/anyOf/1"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "no output follows"),
        ({"patternProperties": {"^a": {}, "a$": {}}}, "#: .*not disjoint"),
    ],
    ids=str,
)
def test_what_cannot_be_compiled_is_named_with_its_place(schema: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        grammars().start(Constraint.json(schema))
    assert caught.value.param == "schema"


def test_a_bad_expression_or_grammar_is_refused_with_the_reason() -> None:
    for constraint in (Constraint.regex("a("), Constraint.grammar("start: nowhere")):
        with pytest.raises(InvalidRequest, match=r"cannot be used: .*(unclosed|unknown name)") as caught:
            grammars().start(constraint)
        assert caught.value.param == "constraint"


def test_a_grammar_may_hold_json_that_follows_a_schema() -> None:
    rule = Constraint.rule({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    call = Constraint.grammar(f'start: "<call>" args "</call>"\nargs: {rule}')
    assert accepts(call, '<call>{"n": 3}</call>')
    assert not accepts(call, '<call>{"n":3}</call>') and not accepts(call, '<call>{"n": "3"}</call>')


def test_a_key_cannot_be_written_in_another_way_to_have_another_type() -> None:
    open_ = {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}, "type": "object"}
    assert accepts(Constraint.json(open_), '{"a": 1, "b": "x"}')
    assert not accepts(Constraint.json(open_), '{"\\u0061": "x"}')


def test_a_grammar_that_grows_too_complex_fails_alone_and_quotes_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(
        "agentkv.engine.grammars.limits", lambda: LLParserLimits(step_lexer_fuel=50, verbose_errors=False)
    )
    ours = Grammars(byte_tokenizer(), WIDTH, [END])
    with pytest.raises(InvalidRequest, match=r"after \d+ tokens the schema takes more work") as caught:
        list(walk(ours.start(Constraint.json({"type": "string", "pattern": "(secret.{0,99}b){9}"})), 0))
    assert "secret" not in str(caught.value) + caplog.text


def test_a_tokenizer_that_has_no_bytes_is_refused_by_name() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    with pytest.raises(Unsupported, match=r"tokenizer Tokenizer is not supported: .*decoder"):
        Grammars(words, 2, [1]).start(POINT)
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        Grammars(None, 2, [1]).start(POINT)


def test_where_the_tokenizer_cannot_go_on_the_output_fails_and_says_so() -> None:
    letters = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "<end>": 2}, merges=[]))
    letters.decoder = byte_tokenizer().backend_tokenizer.decoder
    only_ab = Grammars(letters, 3, [2])
    matcher = only_ab.start(Constraint.regex("a{2}c|ab"))
    matcher.advance(0)
    matcher.advance(0)
    with pytest.raises(InvalidRequest, match="after 2 tokens"):
        matcher.allowed()


def test_logits_of_fewer_columns_than_the_tokenizer_has_tokens_get_a_mask_that_fits() -> None:
    narrow = Grammars(byte_tokenizer(), 300, [END])
    assert narrow.start(POINT).allowed().shape == (300,)


def test_walks_of_the_same_seed_are_the_same() -> None:
    assert walked(POINT, 4) == walked(POINT, 4) is not None


# -- sampling ---------------------------------------------------------------------------------------------------------


def row(seed: int) -> torch.Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 2.0, "top_k": 1, "seed": 3},
        {"temperature": 1.0, "top_p": 0.01, "seed": 3},
        {"temperature": 1.0, "min_p": 1.0, "seed": 3},
        {"temperature": 0.7, "top_k": 3, "top_p": 0.5, "min_p": 0.2, "repetition_penalty": 3.0, "seed": 3},
        {"repetition_penalty": 5.0},
    ],
    ids=str,
)
def test_no_setting_lets_a_token_through_that_is_not_allowed(settings: dict[str, Any]) -> None:
    sampler = Sampler(SamplingParams.build(**settings), CPU)
    draw = torch.Generator().manual_seed(0)
    for step in range(40):
        allowed = torch.rand(WIDTH, generator=draw) < 0.02
        allowed[step] = True
        logits = row(step)
        logits[~allowed] += 20  # whatever is forbidden looks far better
        token, _ = choose(logits, int(logits.argmax()), sampler, list(range(40)), allowed)
        assert allowed[token]


def test_greedy_takes_the_likeliest_of_what_is_allowed() -> None:
    logits = row(1).bfloat16()
    allowed = torch.zeros(WIDTH, dtype=torch.bool)
    allowed[[5, 9, 200]] = True
    token, _ = choose(logits, int(logits.argmax()), Sampler(SamplingParams.build(), CPU), [], allowed)
    assert token == max((5, 9, 200), key=lambda index: float(logits[index]))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.8, "seed": 1}, {"repetition_penalty": 2.0}])
def test_a_mask_that_allows_everything_changes_no_choice(sampling: dict[str, Any]) -> None:
    logits = row(1)

    def chosen(mask: torch.Tensor | None) -> int:
        return choose(logits, int(logits.argmax()), Sampler(SamplingParams.build(**sampling), CPU), [1, 2, 3], mask)[0]

    assert chosen(None) == chosen(torch.ones(WIDTH, dtype=torch.bool))


def test_log_probabilities_are_those_without_the_grammar() -> None:
    logits, allowed = row(2), torch.zeros(WIDTH, dtype=torch.bool)
    allowed[7] = True
    sampler = Sampler(SamplingParams.build(logprobs=2), CPU)
    token, found = choose(logits, int(logits.argmax()), sampler, [], allowed)
    truth = torch.log_softmax(logits, -1)
    assert token == 7 and found is not None
    assert found.logprob == pytest.approx(float(truth[7])) and found.top[0][0] == int(truth.argmax())
