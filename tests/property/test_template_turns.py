"""What holds for any text, any tokenisation and any way of cutting a conversation into turns."""

from __future__ import annotations

from datetime import datetime
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentkv.engine.detokenize import TextStream
from agentkv.engine.templates import ChatTemplate
from agentkv.schemas.messages import normalise

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou help<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    raw.train_from_iterator(["the system user assistant says\n\n aaa abab 日本語 ééé\n  spaces"] * 3, trainer)
    raw.add_special_tokens([AddedToken(token, normalized=False) for token in ("<|im_start|>", "<|im_end|>")])
    built = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>")
    built.chat_template = CHATML
    return built


def cut_at_first_stop(text: str, stops: list[str]) -> str:
    """The text before the stop string that is complete first; of those that end together, the longest."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return text[: min(ends)[1]] if ends else text


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 401), max_size=60), stops=st.lists(st.text("ab é日\ufffd", min_size=1, max_size=4)))
def test_the_stream_of_any_ids_is_their_decode_cut_at_the_first_stop(ids: list[int], stops: list[str]) -> None:
    stream = TextStream(tokenizer(), stops)
    text = "".join([*(stream.push(token).text for token in ids), stream.flush()])
    assert text == stream.text == cut_at_first_stop(tokenizer().decode(ids, skip_special_tokens=True), stops)


@settings(max_examples=200, deadline=None)
@given(text=st.text("abé日 \n"), stops=st.lists(st.text("abé日", min_size=1, max_size=4)), data=st.data())
def test_the_stream_does_not_depend_on_the_tokenisation(text: str, stops: list[str], data: st.DataObject) -> None:
    # any cut of the text gives another tokenisation of it
    at = data.draw(st.integers(0, len(text)))
    encode = tokenizer().backend_tokenizer.encode
    ids = [*encode(text[:at], add_special_tokens=False).ids, *encode(text[at:], add_special_tokens=False).ids]
    stream = TextStream(tokenizer(), stops)
    for token in ids:
        if stream.push(token).stopped:
            break
    stream.flush()
    assert stream.text == cut_at_first_stop(text, stops)


PIECES = ["a", " ", "\n", "é", "日", "<", "<|im_end|>", "<|im_start|>", "|im_end|>", "\ufdd1"]
CONTENT = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


@settings(max_examples=100, deadline=None)
@given(contents=st.lists(st.lists(CONTENT, min_size=1, max_size=3), min_size=1, max_size=3), system=st.none() | CONTENT)
def test_any_turns_give_the_ids_of_the_whole_conversation(contents: list[list[str]], system: str | None) -> None:
    tok = tokenizer()
    template = ChatTemplate(tok, system=system, now=datetime(2024, 1, 1))
    start, end = tok.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    ledger = list(template.head().ids)
    history = [{"role": "system", "content": system}] if system is not None else []
    for index, texts in enumerate(contents):
        new = [{"role": "user", "content": text} for text in texts]
        turn = template.turn(
            normalise(new), ledger, first=not index, after_generated=bool(index), generation_prompt=True
        )
        spans = [*(span for _, span in turn.items), turn.prompt_span]
        assert [0, *(span.stop for span in spans)] == [*(span.start for span in spans), len(turn.ids)]
        assert tok.decode(turn.ids[turn.prompt_span.start :]) == "<|im_start|>assistant\n"
        for (_, span), text in zip(turn.items, texts, strict=True):
            assert f"user\n{text}<|im_end|>\n" in tok.decode(turn.ids[span.start : span.stop])
        ledger += [*turn.ids, *tok.encode("ok"), end]
        history += [*new, {"role": "assistant", "content": "ok"}]
        blocks = len(history) + (system is None)
        assert ledger.count(start) == ledger.count(end) == blocks
        if not any("<|im_" in message["content"] for message in history):
            assert [*ledger, *tok.encode("\n")] == tok.apply_chat_template(history)["input_ids"]
