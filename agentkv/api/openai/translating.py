"""Between OpenAI's forms and this package's: tools, sampling, usage, log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from agentkv.api.calls import Call
from agentkv.api.errors import Refusal
from agentkv.engine.tokenbytes import TokenBytes
from agentkv.errors import InvalidRequest, Unsupported
from agentkv.schemas.replies import Logprob
from agentkv.schemas.sampling import SamplingParams
from agentkv.schemas.tools import check_tool
from agentkv.types import Usage

__all__ = [
    "ModelUnknown",
    "TokenLogprob",
    "TopLogprob",
    "function_tools",
    "model_name",
    "sampling_of",
    "token_logprobs",
    "usage_of",
]

_FUNCTION = ("name", "description", "parameters", "strict")


class ModelUnknown(Refusal):
    """The request names a model that is not served."""

    status, code, param = 404, "model_not_found", "model"


class TopLogprob(BaseModel):
    """A token that was likely. ``bytes``: what it stands for, where ``token`` shows parts of characters as U+FFFD."""

    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


def model_name(call: Call, asked: str) -> str:
    """The served model's name, or ``ModelUnknown``. It also answers to what the server was started with."""
    name = call.kv.model.name
    if asked not in (name, call.kv.settings.model):
        raise ModelUnknown(f"this server has no model {asked!r}; it serves {name!r}")
    return name


def function_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Checked definitions, in the one form that sessions are found by: no nulls, and no ``strict``, which is not for
    the model to read. ``None`` where there are none."""
    found = []
    for index, tool in enumerate(tools or ()):
        where = f"tools[{index}]"
        function = check_tool(tool, where)
        for holder, known, at in ((tool, ("type", "function"), where), (function, _FUNCTION, f"{where}.function")):
            for name in holder:
                if name not in known:
                    raise Unsupported(f"field {at}.{name!s}", "leave it out", param=f"{at}.{name}")
        said = {name: value for name, value in function.items() if value is not None and name != "strict"}
        found.append({"type": "function", "function": said})
    return found or None


def sampling_of(fields: Mapping[str, Any], names: Mapping[str, str] | None = None) -> SamplingParams:
    """Checked parameters from ``fields``, nulls left out. ``names``: what the client calls some of them, for errors."""
    given = {name: value for name, value in fields.items() if value is not None}
    if given.get("temperature") is None and any(given.get(name) is not None for name in ("top_p", "top_k", "min_p")):
        given["temperature"] = 1.0  # they choose among what is drawn: greedy decoding would ignore them
    try:
        return SamplingParams.build(**given)
    except InvalidRequest as error:
        error.param = {"schema": "response_format", **(names or {})}.get(error.param or "", error.param)
        raise


def usage_of(usage: Usage) -> dict[str, Any]:
    """As chat completions tell it."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def token_logprobs(tokens: TokenBytes, logprobs: Iterable[Logprob], end_ids: frozenset[int]) -> list[dict[str, Any]]:
    """Of the answer's tokens, without the one that ends it."""

    def shown(token: int, logprob: float) -> dict[str, Any]:
        raw = tokens.of(token)
        return {"token": raw.decode(errors="replace"), "bytes": list(raw), "logprob": logprob}

    return [
        {**shown(each.token, each.logprob), "top_logprobs": [shown(*top) for top in each.top]}
        for each in logprobs
        if each.token not in end_ids
    ]
