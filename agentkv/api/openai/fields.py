"""Fields that are here for the clients that send them, and may say nothing: anything else is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import AfterValidator, ValidationInfo

from agentkv.errors import Unsupported

__all__ = ["only"]


def only(*values: Any, advice: str = "leave it out") -> AfterValidator:
    """A field that may be left out, null, or one of ``values``."""

    def check(value: Any, info: ValidationInfo) -> Any:
        # 1 == True, and neither may stand for the other.
        if value is None or any(value == known and type(value) is type(known) for known in values):
            return value
        name = str(info.field_name)
        shown = repr(value)
        raise Unsupported(f"{name}={shown if len(shown) <= 60 else shown[:57] + '...'}", advice, param=name)

    checked: Callable[..., Any] = check
    return AfterValidator(checked)
