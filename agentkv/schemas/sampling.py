"""How a turn is sampled."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from agentkv.errors import InvalidRequest, Unsupported

__all__ = ["SamplingParams"]

_MAX_STOPS = 16
_Number = Annotated[float, Field(allow_inf_nan=False)]


class SamplingParams(BaseModel):
    """Sampling of one turn. ``None`` means: not applied. Without a temperature, or with 0, decoding is greedy.

    Make one with ``build``, which raises this package's errors; the constructor raises pydantic's.
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

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return not self.temperature

    @classmethod
    def build(cls, **kwargs: Any) -> Self:
        """Checked parameters. Raises ``InvalidRequest`` whose ``param`` is the one that is wrong."""
        for name in kwargs:
            if name not in cls.model_fields:
                raise InvalidRequest(_unknown(name, tuple(cls.model_fields)), param=name)
        try:
            return cls(**kwargs)
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


def _refuse(name: str, value: float) -> float:
    if value:
        raise Unsupported(f"{name}={value:g}", "use repetition_penalty, or leave it at 0", param=name)
    return value


def _unknown(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f", did you mean {near[0]!r}?" if near else ""
    return f"unknown sampling parameter {name!r}{hint} (known: {', '.join(sorted(known))})"
