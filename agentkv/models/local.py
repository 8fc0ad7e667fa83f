"""Models on this machine: what was pulled, and folders of the user's own. Nothing here touches the network."""

from __future__ import annotations

import json
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentkv.errors import Unsupported
from agentkv.models.catalogue import CATALOGUE
from agentkv.models.child import tree_bytes
from agentkv.models.fingerprints import combined_digest, file_digest
from agentkv.models.sources import ADAPTER_CONFIG
from agentkv.settings import Settings

__all__ = [
    "MARKER",
    "ListedModel",
    "LocalModel",
    "cached_digest",
    "gguf_slug",
    "list_models",
    "resolve",
    "write_marker",
]

MARKER = "agentkv-model.json"
_DIGESTS = ".digests.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A checkpoint folder that can be loaded now.

    ``source`` is where it came from, ``folder`` for the user's own. ``digest``: of its weights, 64 hex digits.
    """

    name: str
    path: Path
    source: str
    licence: str | None
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A line of the list of models; ``local`` is ``None`` for one of the catalogue that was not pulled yet."""

    name: str
    description: str
    licence: str | None
    nbytes: int
    local: LocalModel | None


def resolve(name: str, settings: Settings) -> LocalModel | None:
    """The model called ``name`` if it is here: pulled before, or a folder. ``None`` where a pull could bring it.

    A folder's weights are hashed the first time it is seen, which takes about a second a gigabyte. One that holds an
    adapter is ``Unsupported``: transformers would load its base model alone, and say nothing.
    """
    if name in CATALOGUE:
        return read_pulled(settings.models_dir / name)
    path = Path(name).expanduser()
    if (path / ADAPTER_CONFIG).is_file():
        raise Unsupported(
            f"the adapter (LoRA) in {path}",
            "merge it into its base model first (peft: merge_and_unload(), then save_pretrained), and load that folder",
            param="model",
        )
    if (path / "config.json").is_file():
        # A marker is believed in the home only: elsewhere the weights may have been changed since.
        if path.resolve().parent == settings.models_dir.resolve() and (pulled := read_pulled(path.resolve())):
            return pulled
        return _folder(path.resolve(), settings)
    if path.suffix == ".gguf" and path.is_file():
        return read_pulled(settings.models_dir / gguf_slug(path, settings))
    if is_hub_id(name):
        return read_pulled(settings.models_dir / hub_slug(name))
    return read_pulled(settings.models_dir / name) if re.fullmatch(r"\w[\w.-]*", name) else None


def list_models(settings: Settings) -> list[ListedModel]:
    """The catalogue, then everything else that was pulled, by name."""
    listed = []
    for entry in CATALOGUE.values():
        local = read_pulled(settings.models_dir / entry.name)
        nbytes = local.nbytes if local else entry.nbytes
        listed.append(ListedModel(entry.name, entry.description, entry.licence.name, nbytes, local))
    folders = sorted(settings.models_dir.iterdir()) if settings.models_dir.is_dir() else []
    others = [read_pulled(folder) for folder in folders if folder.name not in CATALOGUE and folder.name[0] != "."]
    listed += [ListedModel(it.name, f"pulled from {it.source}", it.licence, it.nbytes, it) for it in others if it]
    return listed


def is_hub_id(name: str) -> bool:
    """Whether ``name`` has the form ``owner/name``."""
    return _HUB_ID.fullmatch(name) is not None


def hub_slug(repo_id: str) -> str:
    """Folder name of a hub model."""
    return repo_id.replace("/", "--")


def gguf_slug(path: Path, settings: Settings) -> str:
    """Folder name of a converted file: its stem, and eight digits of its digest, so that a changed file is another."""
    stem = re.sub(r"[^a-z0-9.]+", "-", path.stem.lower()).strip("-.") or "model"
    return f"{stem}-{cached_digest(path.resolve(), settings.models_dir)[:8]}"


def read_pulled(folder: Path) -> LocalModel | None:
    """The pulled model in ``folder``; ``None`` without a readable marker."""
    try:
        marker = json.loads((folder / MARKER).read_text())
        return LocalModel(
            name=marker["name"],
            path=folder,
            source=marker["source"],
            licence=marker["licence"]["name"] if marker["licence"] else None,
            nbytes=marker["nbytes"],
            digest=marker["digest"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_marker(folder: Path, **facts: Any) -> None:
    """Hash the files of ``folder``, make them owner-only, write ``agentkv-model.json``: ``facts``, digests, sizes."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
        if path.is_file():
            digests[path.relative_to(folder).as_posix()] = file_digest(path)
    weights = {name: digest for name, digest in digests.items() if name.endswith(".safetensors")}
    marker = facts | {
        "format": 1,
        "nbytes": tree_bytes(folder),
        "digest": combined_digest(weights),
        "files": {name: f"blake3:{digest}" for name, digest in digests.items()},
    }
    path = folder / MARKER
    path.write_text(json.dumps(marker, indent=2) + "\n")
    path.chmod(0o600)


def make_models_dir(models_dir: Path) -> None:
    """Create it, and the home around it, for the owner only; what exists keeps its mode."""
    models_dir.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    models_dir.mkdir(mode=0o700, exist_ok=True)


def cached_digest(path: Path, models_dir: Path) -> str:
    """blake3 of ``path``, remembered in ``<models_dir>/.digests.json`` under its path, size and modification time."""
    cache = models_dir / _DIGESTS
    try:
        known = dict(json.loads(cache.read_text()))
    except (OSError, ValueError, TypeError):
        known = {}
    stat = path.stat()
    entry = known.get(str(path))
    if isinstance(entry, list) and entry[:2] == [stat.st_size, stat.st_mtime_ns] and len(entry) == 3:
        return str(entry[2])
    digest = file_digest(path)
    known = {name: entry for name, entry in known.items() if Path(name).exists()}
    known[str(path)] = [stat.st_size, stat.st_mtime_ns, digest]
    _write_cache(cache, known)
    return digest


def _write_cache(cache: Path, known: dict[str, Any]) -> None:
    temporary = cache.with_name(f".digests-{secrets.token_hex(4)}")
    try:
        make_models_dir(cache.parent)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(known, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(cache)
    except OSError:
        # A read-only or full home costs the cache, never the answer.
        temporary.unlink(missing_ok=True)


def _folder(path: Path, settings: Settings) -> LocalModel:
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise Unsupported(f"model folder {path}", "it has a config.json but no *.safetensors weights", param="model")
    digest = combined_digest({file.name: cached_digest(file, settings.models_dir) for file in weights})
    return LocalModel(path.name, path, "folder", None, tree_bytes(path), digest)
