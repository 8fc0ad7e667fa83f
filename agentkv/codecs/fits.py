"""Codecs as one model uses them: each with what calibration has found, and those that old chunks still name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentkv.codecs.contract import CODECS, Codec, Fit, MissingFit

__all__ = ["Codecs"]


class Codecs:
    """The codecs of one model. Thread-safe.

    ``fits``: every fit that chunks may name. ``current``: by codec name, the digest of the one to encode with.
    """

    def __init__(self, fits: Sequence[Fit] = (), current: Mapping[str, str] | None = None) -> None:
        self._fitted = {(fit.codec, fit.digest): CODECS.get(fit.codec).fitted(fit) for fit in fits}
        self._current = dict(current or {})

    def adopt(self, fit: Fit) -> None:
        """Decode what names ``fit``, too. ``ValueError`` where it does not hold together."""
        self._fitted[fit.codec, fit.digest] = CODECS.get(fit.codec).fitted(fit)

    def encoder(self, name: str) -> Codec:
        """The codec called ``name``, fitted where the model was calibrated. ``InvalidRequest`` lists the known ones."""
        fitted = self._fitted.get((name, self._current.get(name, "")))
        return CODECS.get(name) if fitted is None else fitted

    def decoder(self, name: str, parameters: Mapping[str, Any]) -> Codec:
        """What decodes a payload written with ``parameters``. ``MissingFit`` where its fit is not here."""
        digest = parameters.get("fit")
        if digest is None:
            return CODECS.get(name)
        try:
            return self._fitted[name, digest]
        except (KeyError, TypeError):
            raise MissingFit(f"it was encoded by {name!r} with fit {digest}, which is not here") from None
