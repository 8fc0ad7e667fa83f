"""How a turn is sampled."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    InstanceOf,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from agentkv.errors import InvalidRequest, Unsupported
from agentkv.schemas.constraints import Constraint
from agentkv.schemas.fields import known_only, typed
from agentkv.schemas.tool_choice import ToolChoice

__all__ = ["SamplingParams"]

_MAX_STOPS = 16
_FORMAT_FIELDS = {"text": ("type",), "json_object": ("type",), "json_schema": ("type", "json_schema")}
_SCHEMA_FIELDS = {"name": str, "description": str, "strict": bool}
_OUTPUTS = ("schema", "response_format", "constraint")
_Number = Annotated[float, Field(allow_inf_nan=False)]


class SamplingParams(BaseModel):
    """Sampling of one turn. ``None`` means: not applied. Without a temperature, or with 0, decoding is greedy.

    Make one with ``build``, which raises this package's errors; the constructor raises pydantic's. ``build`` takes
    ``schema`` (a pydantic class or a JSON Schema) and ``response_format`` (OpenAI's form) for ``constraint``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    temperature: _Number | None = Field(None, ge=0, le=2, description="0 to 2; None or 0 is greedy.")
    top_p: _Number | None = Field(None, gt=0, le=1, description="Nucleus: smallest set with this probability.")
    top_k: int | None = Field(None, ge=1, description="Only the k most likely tokens.")
    min_p: _Number | None = Field(None, ge=0, le=1, description="Least probability, relative to the likeliest token.")
    repetition_penalty: _Number | None = Field(None, gt=0, description="Above 1 discourages tokens already present.")
    presence_penalty: _Number = Field(0.0, description="Refused unless 0.")
    frequency_penalty: _Number = Field(0.0, description="Refused unless 0.")
    seed: int | None = Field(None, ge=-(2**63), lt=2**64, description="Same seed, same session: same output.")
    stop: tuple[str, ...] = Field((), description="Up to 16 strings that end the reply and are no part of it.")
    max_tokens: int | None = Field(None, ge=1, description="Generation limit; None is the runtime's default.")
    logprobs: int | None = Field(None, ge=0, le=20, description="Log-probabilities of this many alternatives.")
    ignore_eos: bool = Field(False, description="Go on after the model's end token, up to max_tokens.")
    beams: int = Field(1, ge=1, le=32, description="Beam search with so many beams; 1 is none.")
    length_penalty: _Number = Field(1.0, description="Beams: scores are divided by length to this power.")
    early_stopping: bool | Literal["never"] = Field(False, description="Beams: when to end, as transformers means it.")
    tool_choice: Annotated[InstanceOf[ToolChoice], WithJsonSchema(ToolChoice.SCHEMA)] = Field(
        ToolChoice(), description="Whether it may, must or must not call tools."
    )
    constraint: SkipJsonSchema[InstanceOf[Constraint] | None] = Field(None, description="What the output looks like.")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return not self.temperature

    @classmethod
    def build(cls, **kwargs: Any) -> Self:
        """Checked parameters. Raises ``InvalidRequest`` whose ``param`` is the one that is wrong."""
        known = {**dict.fromkeys(_OUTPUTS), **cls.model_fields}
        for name in kwargs:
            if name not in known:
                raise InvalidRequest(_unknown(name, tuple(known)), param=name)
        others = {name: value for name, value in kwargs.items() if name not in _OUTPUTS}
        try:
            return cls(**others, constraint=_constraint({name: kwargs.get(name) for name in _OUTPUTS}))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            cause = first.get("ctx", {}).get("error")
            if isinstance(cause, InvalidRequest):
                raise cause from None
            param = str(first["loc"][0]) if first["loc"] else None
            raise InvalidRequest(f"{param}: {first['msg']}, got {first['input']!r}", param=param) from None

    @field_validator("stop", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> tuple[str, ...]:
        stops = () if value is None else (value,) if isinstance(value, str) else value
        if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) for stop in stops):
            raise InvalidRequest(f"stop: must be a string or a list of strings, got {value!r}", param="stop")
        if len(stops) > _MAX_STOPS:
            raise InvalidRequest(f"stop: at most {_MAX_STOPS} strings, got {len(stops)}", param="stop")
        if not all(stops):
            raise InvalidRequest("stop: an empty string would stop before the first token", param="stop")
        return tuple(stops)

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _as_choice(cls, value: Any) -> ToolChoice:
        return ToolChoice.parse(value)

    @field_validator("presence_penalty", "frequency_penalty", mode="before")
    @classmethod
    def _none_is_zero(cls, value: Any) -> Any:
        return 0.0 if value is None else value

    @field_validator("presence_penalty")
    @classmethod
    def _no_presence(cls, value: float) -> float:
        return _refuse("presence_penalty", value)

    @field_validator("frequency_penalty")
    @classmethod
    def _no_frequency(cls, value: float) -> float:
        return _refuse("frequency_penalty", value)

    @model_validator(mode="after")
    def _beams_alone(self) -> Self:
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "logprobs", "constraint"):
            if self.beams > 1 and getattr(self, name) not in (None, (), 0):
                raise InvalidRequest(f"beams: a beam search takes no {name}; leave one of the two out", param="beams")
        return self

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.ignore_eos and self.constraint is not None:
            raise InvalidRequest(
                f"ignore_eos: an output with a {self.constraint.param} ends where that ends", param="ignore_eos"
            )
        if self.tool_choice.mode == "required" and self.constraint is not None:
            raise InvalidRequest(
                f"tool_choice 'required' with a {self.constraint.param}: a reply is a call or follows that, not both",
                param="tool_choice",
            )
        if self.tool_choice.mode == "required" and (self.ignore_eos or self.beams > 1):
            param = "ignore_eos" if self.ignore_eos else "beams"
            raise InvalidRequest(
                f"{param}: not with tool_choice 'required', whose replies follow a grammar", param=param
            )
        return self


def _constraint(given: Mapping[str, Any]) -> Constraint | None:
    """The one constraint that was given, in whichever way."""
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise InvalidRequest(f"{' and '.join(names)}: pass one of them", param=names[1])
    if (schema := given["schema"]) is not None:
        return Constraint.json(schema)
    if (wanted := given["response_format"]) is not None:
        return _response_format(wanted)
    if (constraint := given["constraint"]) is not None and not isinstance(constraint, Constraint):
        raise InvalidRequest(
            f"constraint: pass Constraint.json(…), .regex(…) or .grammar(…), not {type(constraint).__name__}",
            param="constraint",
        )
    return constraint


def _response_format(wanted: Any) -> Constraint | None:
    """OpenAI's ``response_format``, or a pydantic class."""
    if isinstance(wanted, type):
        return Constraint.json(wanted)
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if isinstance(kind, str) and kind in _FORMAT_FIELDS:
        known_only(wanted, _FORMAT_FIELDS[kind], "response_format")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint.json({"type": "object"})
    inner = wanted.get("json_schema") if isinstance(wanted, Mapping) else None
    if kind == "json_schema" and isinstance(inner, Mapping) and isinstance(inner.get("schema"), Mapping):
        known_only(inner, ("schema", *_SCHEMA_FIELDS), "response_format.json_schema")
        typed(inner, _SCHEMA_FIELDS, "response_format.json_schema")
        return Constraint.json(inner["schema"])
    raise InvalidRequest(
        'response_format: pass {"type": "text"}, {"type": "json_object"}, a pydantic class, or '
        '{"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}',
        param="response_format",
    )


def _refuse(name: str, value: float) -> float:
    if value:
        raise Unsupported(f"{name}={value:g}", "use repetition_penalty, or leave it at 0", param=name)
    return value


def _unknown(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f", did you mean {near[0]!r}?" if near else ""
    return f"unknown sampling parameter {name!r}{hint} (known: {', '.join(sorted(known))})"
