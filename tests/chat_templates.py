"""Chat templates of five families, written like the families' own, each with a tiny tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

__all__ = [
    "CHATML",
    "FAMILIES",
    "GEMMA",
    "LLAMA3",
    "MISTRAL",
    "NAMED_MISTRAL",
    "NOW",
    "QWEN3",
    "QWEN_CODER",
    "TOOL",
    "tokenizer",
    "with_special",
]

# Templates are written as their families write them.
# ruff: noqa: E501
NOW = datetime(2024, 2, 29, 12, 30)
CORPUS = [
    "You are a helpful assistant. Hello there, how are you today?\n\n",
    "The user asks about the weather in Paris; the tool says sunny, 21 degrees.\n",
    '{"name": "get_weather", "arguments": {"city": "Paris"}}\n\n\nsystem user assistant tool ipython model\n',
]

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- set date_string = strftime_now("%d %b %Y") %}
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + date_string + '\n\n' + system + '<|eot_id|>' }}
{%- if tools is not none %}
    {%- set first = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\nGiven the following functions:\n\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) + '\n\n' }}{% endfor %}
    {{- first + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls|length != 1 %}{{- raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + message.content | tojson + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
GEMMA = """{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}
{%- set prefix = messages[0]['content'] + '\n\n' -%}{%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set prefix = '' -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif -%}
{%- if message['role'] == 'assistant' -%}{%- set role = 'model' -%}{%- else -%}{%- set role = message['role'] -%}{%- endif -%}
{{ '<start_of_turn>' + role + '\n' + (prefix if loop.first else '') + (message['content'] | trim) + '<end_of_turn>\n' }}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""
MISTRAL = """{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set messages = messages[1:] %}{% endif %}
{{- bos_token }}
{%- for message in messages if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate user and assistant') }}{% endif %}
{%- endfor %}
{%- set last_user = messages | selectattr('role', 'equalto', 'user') | list | last %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and message == last_user %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
        {%- if system is defined and message == last_user %}{{- '[INST] ' + system + '\n\n' + message.content + '[/INST]' }}
        {%- else %}{{- '[INST] ' + message.content + '[/INST]' }}{% endif %}
    {%- elif message.tool_calls is defined and message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id|length != 9 %}{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']' + eos_token if loop.last else ', ') }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}"""
QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{% endif %}
    {{- "# Tools\n<tools>" }}{% for tool in tools %}{{- "\n" + tool | tojson }}{% endfor %}{{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and loop.last %}{{- '<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""

QWEN_CODER = """{%- if tools %}{{- '<|im_start|>system\n' }}{% for tool in tools %}{{- tool.function.name }}{% endfor %}{{- '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}
        {%- for key, value in call.function.arguments | items %}{{- '<parameter=' + key + '>\n' + value + '\n</parameter>\n' }}{% endfor %}
        {{- '</function>\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
NAMED_MISTRAL = """{{- bos_token }}{% for message in messages %}
    {%- if message.role == 'user' %}{% if tools %}{{- tools | tojson }}{% endif %}{{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- else %}{{- message.content }}
        {%- for call in message.tool_calls or [] %}{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}{% endfor %}{{- eos_token }}
    {%- endif %}
{%- endfor %}"""

FAMILIES: dict[str, tuple[str, list[str], str | None, str]] = {
    "chatml": (CHATML, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], None, "<|im_end|>"),
    "llama3": (
        LLAMA3,
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|begin_of_text|>",
        "<|eot_id|>",
    ),
    "gemma": (GEMMA, ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], "<bos>", "<end_of_turn>"),
    "mistral": (MISTRAL, ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]"], "<s>", "</s>"),
    "qwen3": (QWEN3, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], None, "<|im_end|>"),
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@cache
def tokenizer(family: str, kind: str = "byte") -> PreTrainedTokenizerFast:
    template, special, bos, eos = FAMILIES[family]
    if kind == "byte":
        raw = Tokenizer(models.BPE())
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
    else:  # as Llama 2 and Gemma: words marked by their leading space, which a text's beginning gets, too
        raw = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        raw.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        byte_tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=620, special_tokens=byte_tokens, show_progress=False)
    raw.train_from_iterator(CORPUS * 3, trainer)
    raw.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    built = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=bos, eos_token=eos)
    built.chat_template = template
    return built


def with_special(family: str, extra: Sequence[str], source: str | None = None) -> PreTrainedTokenizerFast:
    """The family's tokenizer with more special tokens, and perhaps another chat template."""
    backend = tokenizer(family).backend_tokenizer
    raw = type(backend).from_str(backend.to_str())
    raw.add_special_tokens([AddedToken(token, normalized=False) for token in extra])
    changed = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token=FAMILIES[family][2], eos_token=FAMILIES[family][3]
    )
    changed.chat_template = source or FAMILIES[family][0]
    return changed
