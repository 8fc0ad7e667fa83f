"""Bringing a model into the home folder, and taking it out again.

A pull works in ``<models_dir>/.tmp-…`` and ends with one rename, so that a model is there whole or not at all. Pulls
and removals of one home wait for each other on ``<models_dir>/.lock``. The kernel drops that lock when its owner dies,
however it dies: whoever holds it knows that every ``.tmp-*`` there is was left by the dead, and sweeps them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from agentkv.errors import InvalidRequest, ModelNotFound, ModelUnavailable, StorageFull
from agentkv.models.catalogue import CATALOGUE, Licence
from agentkv.models.child import ChildFailed, Progress, run_child
from agentkv.models.local import (
    LocalModel,
    cached_digest,
    gguf_slug,
    hub_slug,
    is_hub_id,
    make_models_dir,
    read_pulled,
    resolve,
    write_marker,
)
from agentkv.models.sources import Fetched, GgufFile, HubSource, Source, SourceFailed
from agentkv.settings import Settings

__all__ = ["pull", "remove"]

_CONVERT_LIMIT_SECONDS = 4 * 3600.0


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where a model would go and what is tried to get it."""

    name: str
    folder: Path
    sources: tuple[Source, ...]
    licence: Licence | None = None
    chat_template: str | None = None


def pull(name_or_path: str, settings: Settings, progress: Progress | None = None) -> LocalModel:
    """The model called ``name_or_path``, fetched and converted first where it is not here yet.

    A catalogue name, a local checkpoint folder (used where it is), a ``.gguf`` file (converted once), or a Hugging Face
    id. Blocks for as long as it takes, other pulls of this home included; an exception from ``progress`` abandons it.

    Raises ``ModelNotFound`` for what is none of these, ``ModelUnavailable`` with each source's reason, ``StorageFull``.
    """
    report = progress or _silent
    if (found := resolve(name_or_path, settings)) is not None:
        return found
    plan = _plan(name_or_path, settings)
    if settings.offline and not all(isinstance(source, GgufFile) for source in plan.sources):
        raise ModelUnavailable(name_or_path, {"offline": f"`offline` is set and {plan.folder} does not exist"})
    try:
        with _locked(settings.models_dir, report):
            _sweep(settings.models_dir)
            return read_pulled(plan.folder) or _pull(plan, settings, report)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise StorageFull(f"no room for model {plan.name!r} in {settings.models_dir}: {error.strerror}") from error
        raise


def remove(name: str, settings: Settings) -> int:
    """Delete a pulled model; return the bytes freed. A folder of the user's own is refused with ``InvalidRequest``.

    A process that has it loaded keeps its memory maps. ``ModelNotFound`` where nothing of that name was pulled.
    """
    found = resolve(name, settings)
    if found is None:
        raise ModelNotFound(f"model {name!r} is not on this machine; `agentkv models list` shows those that are")
    if found.path.parent != settings.models_dir.resolve() and found.path.parent != settings.models_dir:
        raise InvalidRequest(f"{found.path} is your own folder, not a pulled model: delete it yourself", param="model")
    with _locked(settings.models_dir, _silent):
        _sweep(settings.models_dir)
        if not found.path.exists():
            return 0
        doomed = _temporary(settings.models_dir, found.path.name)
        found.path.rename(doomed)
        shutil.rmtree(doomed)
    return found.nbytes


def _plan(name: str, settings: Settings) -> _Plan:
    if (entry := CATALOGUE.get(name)) is not None:
        return _Plan(name, settings.models_dir / name, entry.sources, entry.licence, entry.chat_template)
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        file = GgufFile(path.resolve(), cached_digest(path.resolve(), settings.models_dir))
        slug = gguf_slug(path, settings)
        return _Plan(slug, settings.models_dir / slug, (file,))
    known = ", ".join(CATALOGUE)
    if path.is_dir():
        raise ModelNotFound(f"{name!r} is a folder without config.json; known names: {known}")
    if not is_hub_id(name):
        raise ModelNotFound(
            f"{name!r} is no known model (known: {known}), no local folder or .gguf file, and no hub id `owner/name`"
        )
    return _Plan(name, settings.models_dir / hub_slug(name), (HubSource(name),))


def _pull(plan: _Plan, settings: Settings, progress: Progress) -> LocalModel:
    """Try the sources in turn. Runs under the lock."""
    reasons = {}
    for source in plan.sources:
        workdir = _temporary(settings.models_dir, plan.folder.name)
        workdir.mkdir(mode=0o700)
        try:
            fetched = source.fetch(workdir, timeout_seconds=settings.hub_timeout_seconds, progress=progress)
            model = fetched.folder or _convert(fetched, workdir, progress)
            _finish(model, plan, source, fetched, progress)
            model.rename(plan.folder)
            _sync(settings.models_dir)
        except SourceFailed as failed:
            reasons[source.label] = str(failed)
        except ChildFailed as failed:
            reasons[source.label] = f"conversion failed: {failed.reason}"
        else:
            pulled = read_pulled(plan.folder)
            assert pulled is not None
            return pulled
        finally:
            shutil.rmtree(workdir, ignore_errors=True)
    raise ModelUnavailable(plan.name, reasons)


def _convert(fetched: Fetched, workdir: Path, progress: Progress) -> Path:
    assert fetched.gguf is not None
    model = workdir / "model"
    model.mkdir(mode=0o700)
    run_child(
        "agentkv.models.convert:convert_in_child",
        [str(fetched.gguf), str(model)],
        workdir=workdir,
        progress=progress,
        stage="convert",
        total=None,
        stall_seconds=None,
        limit_seconds=_CONVERT_LIMIT_SECONDS,
    )
    return model


def _finish(model: Path, plan: _Plan, source: Source, fetched: Fetched, progress: Progress) -> None:
    """Template, marker, modes, and everything on the disk before the rename makes it visible."""
    progress("verify", 0, None)
    shutil.rmtree(model / ".cache", ignore_errors=True)
    if plan.chat_template is not None:
        (model / "chat_template.jinja").write_text(plan.chat_template)
    write_marker(
        model,
        name=plan.name,
        source=source.label,
        source_digests=fetched.digests,
        licence=asdict(plan.licence) if plan.licence else None,
        converted_from=fetched.gguf.name if fetched.gguf else None,
        versions={package: _version(package) for package in ("agentkv", "transformers", "torch", "gguf")},
    )
    for path in sorted(model.rglob("*"), reverse=True):
        _sync(path)
    _sync(model)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _temporary(models_dir: Path, name: str) -> Path:
    return models_dir / f".tmp-{name}-{os.getpid()}-{secrets.token_hex(4)}"


def _sweep(models_dir: Path) -> None:
    """Delete what dead pulls left. Runs under the lock; see the module's docstring."""
    for leftover in models_dir.glob(".tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _locked(models_dir: Path, progress: Progress) -> Iterator[None]:
    make_models_dir(models_dir)
    descriptor = os.open(models_dir / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress("wait for another pull", 0, None)
                time.sleep(0.2)
        yield
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _silent(_stage: str, _done: int, _total: int | None, /) -> None:
    """No progress wanted."""
