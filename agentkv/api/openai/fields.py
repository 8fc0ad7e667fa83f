"""Fields that are here for the clients that send them, and may say nothing: anything else is refused by its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import AfterValidator, GetJsonSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema

from agentkv.errors import Unsupported

__all__ = ["only"]


@dataclass(frozen=True, slots=True)
class _Only(AfterValidator):
    """As ``AfterValidator``, and the document says which values there are."""

    values: tuple[Any, ...]

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [*self.values, None]}


def only(*values: Any, advice: str = "leave it out") -> AfterValidator:
    """A field that may be left out, null, or one of ``values``."""

    def check(value: Any, info: ValidationInfo) -> Any:
        # 1 == True, and neither may stand for the other.
        if value is None or any(value == known and type(value) is type(known) for known in values):
            return value
        name = str(info.field_name)
        shown = repr(value)
        raise Unsupported(f"{name}={shown if len(shown) <= 60 else shown[:57] + '...'}", advice, param=name)

    return _Only(check, values)
