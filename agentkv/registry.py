"""One registry for everything that can be chosen by name: codecs, layouts, policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from agentkv.errors import InvalidRequest

__all__ = ["Registry", "load_plugins"]

T = TypeVar("T")
_made: list[Registry[Any]] = []


class Registry(Generic[T]):
    """Names to objects of one kind. Third parties add theirs under the entry point group ``agentkv.<kind>``.

    ``what``: one of them, in an error's words. ``others``: names that are chosen elsewhere, and stand for one of them.
    """

    def __init__(self, kind: str, what: str | None = None, *, others: tuple[str, ...] = ()) -> None:
        self.kind = kind
        self._what = what or kind
        self._others = others
        self._known: dict[str, T] = {}
        self._scanned = False
        _made.append(self)

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: make the object known as ``name``. A second object under one name raises ``ValueError``."""

        def add(thing: T) -> T:
            if name in self._known:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._known[name] = thing
            return thing

        return add

    def get(self, name: str) -> T:
        """The object called ``name``; ``InvalidRequest`` lists the known ones."""
        if name not in self._known:
            self._scan()
        try:
            return self._known[name]
        except KeyError:
            known = ", ".join([*self._others, *sorted(self._known)])
            raise InvalidRequest(f"unknown {self._what} {name!r}; known: {known}", param=self.kind) from None

    def __iter__(self) -> Iterator[str]:
        self._scan()
        return iter(sorted(self._known))

    def _scan(self) -> None:
        if self._scanned:
            return
        for point in entry_points(group=f"agentkv.{self.kind}"):
            if point.name not in self._known:
                self._known[point.name] = point.load()
        self._scanned = True


def load_plugins() -> None:
    """Find what other packages have registered, so that no later look-up reads the disk for it. Blocking."""
    for registry in _made:
        registry._scan()
