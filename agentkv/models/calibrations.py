"""What calibration has found out about a model, kept in the home: one folder a KV fingerprint.

    <home>/calibration/<kv fingerprint>/report.json             the last report
                                        <digest>.safetensors    a fit; old ones stay, old chunks name them

Nothing here is needed to read a ledger: what is damaged or foreign is a warning, and the model counts as that much less
calibrated. Reading a report imports no torch; reading fits does.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3
from pydantic import ValidationError

from agentkv.codecs import CODECS, Codecs, Fit
from agentkv.errors import AgentKVError, StorageFull
from agentkv.logs import Log
from agentkv.models.fingerprints import weights_digest_of_state_dict
from agentkv.models.gate import Calibration, current_fits

__all__ = ["StoredCalibration", "fit_path", "keep_fit", "load_calibration", "save_calibration"]

log = Log(__name__)

_REPORT = "report.json"
_SUFFIX = ".safetensors"
_TEMPORARY = ".tmp-"
_STALE_SECONDS = 3600.0
_FIT_FORMAT = "1"


@dataclass(frozen=True, slots=True, eq=False)
class StoredCalibration:
    """What one home knows of one model.

    ``report``: the last one, without the results whose fit is not here; ``None`` where the model was never calibrated.
    ``fits``: all that old and new chunks may name. ``warnings``: a sentence for each file that could not be used.
    """

    report: Calibration | None = None
    fits: tuple[Fit, ...] = ()
    warnings: tuple[str, ...] = ()

    def codecs(self, max_kl: float) -> Codecs:
        """The model's codecs, each encoding with its strongest fit whose mean KL was at most ``max_kl`` nats."""
        return Codecs(self.fits, {} if self.report is None else current_fits(self.report, max_kl))


def calibration_folder(home: Path, kv_fingerprint: str) -> Path:
    """Where a model's results lie, whether it was calibrated or not."""
    return home / "calibration" / kv_fingerprint


def load_calibration(home: Path, kv_fingerprint: str) -> StoredCalibration:
    """Whatever of it is intact. Blocking. Raises nothing: each warning is logged and returned."""
    folder = calibration_folder(home, kv_fingerprint)
    warnings: list[str] = []
    fits = tuple(_fits(folder, warnings))
    report = _report(folder / _REPORT, kv_fingerprint, {fit.digest for fit in fits}, warnings)
    for warning in warnings:
        log.warning("calibration_not_used", detail=warning)
    return StoredCalibration(report, fits, tuple(warnings))


def save_calibration(home: Path, report: Calibration, fits: Sequence[Fit] = ()) -> Path:
    """Keep ``report`` instead of the last one, and ``fits`` beside those of old. Durable when it returns. Blocking.

    Returns the folder. Fits come first: a report never names one that is not there. ``StorageFull`` where the home
    cannot be written; the last report is then as it was.
    """
    folder = calibration_folder(home, report.kv_fingerprint)
    try:
        _make_folder(folder)
        for fit in fits:
            _write(fit_path(home, report.kv_fingerprint, fit.digest), _packed(fit))
        _write(folder / _REPORT, (report.model_dump_json(indent=2) + "\n").encode())
        _sync(folder)
    except OSError as error:
        raise StorageFull(
            f"the calibration cannot be written to {folder}: {error.strerror}; free space, or choose another --home"
        ) from error
    return folder


def fit_path(home: Path, kv_fingerprint: str, digest: str) -> Path:
    """Where a model's fit lies, if it is here. ``ValueError`` for what names none."""
    if not re.fullmatch("[0-9a-f]{8,128}", digest):
        raise ValueError(f"a fit is named by hexadecimal digits, not {digest!r}")
    return calibration_folder(home, kv_fingerprint) / f"{digest}{_SUFFIX}"


def keep_fit(home: Path, kv_fingerprint: str, digest: str, content: bytes) -> tuple[Fit, bool]:
    """Keep a fit that comes from another home beside this one's own. Durable when it returns. Blocking.

    Returns it, and whether it is new here. No codec encodes with it: the report decides on that. ``ValueError`` where
    ``content`` is no fit of that name, or this home has another one under it; ``StorageFull`` as ``save_calibration``.
    """
    path = fit_path(home, kv_fingerprint, digest)
    try:
        _make_folder(path.parent)
        with _written(path.parent, content) as temporary:
            fit = _unpacked(temporary, digest)
            CODECS.get(fit.codec).fitted(fit)
            held = _held(path, digest)
            if held is not None:
                if _says(held) != _says(fit):
                    raise ValueError(f"this home has another fit {digest}")
                return held, False
            temporary.replace(path)
        _sync(path.parent)
    except OSError as error:
        raise StorageFull(f"a fit cannot be written to {path.parent}: {error.strerror}; free space there") from error
    return fit, True


def _report(path: Path, kv_fingerprint: str, fits: set[str], warnings: list[str]) -> Calibration | None:
    try:
        found = Calibration.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        warnings.append(f"the calibration report {path} cannot be read ({error.strerror}): calibrate the model again")
        return None
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, fault["loc"]))
        reason = f"{where}: {fault['msg']}" if where else str(fault["msg"])
        warnings.append(f"the calibration report {path} is damaged ({reason}): calibrate the model again")
        return None
    if found.kv_fingerprint != kv_fingerprint:
        warnings.append(
            f"the calibration report {path} is of another model ({found.kv_fingerprint}): calibrate this one"
        )
        return None
    usable = []
    for result in found.codecs:
        if result.encoder not in set(CODECS):
            warnings.append(f"{path} speaks of the codec {result.encoder!r}, which is not installed")
        elif result.fit is not None and result.fit not in fits:
            warnings.append(f"{path} speaks of the fit {result.fit} of {result.codec}, which is not here or damaged")
        else:
            usable.append(result)
    return found.model_copy(update={"codecs": tuple(usable)})


def _fits(folder: Path, warnings: list[str]) -> list[Fit]:
    found = []
    for path in sorted(folder.glob(f"*{_SUFFIX}")) if folder.is_dir() else ():
        if path.name.startswith("."):
            continue
        try:
            fit = _unpacked(path, path.name.removesuffix(_SUFFIX))
            CODECS.get(fit.codec).fitted(fit)
            found.append(fit)
        except (OSError, ValueError, AgentKVError) as error:
            warnings.append(
                f"the fit {path} cannot be used ({str(error).splitlines()[0]}): chunks that name it are recomputed"
            )
    return found


def _packed(fit: Fit) -> bytes:
    from safetensors.torch import save

    facts = json.dumps(dict(fit.facts), sort_keys=True, allow_nan=False)
    metadata = {"agentkv": _FIT_FORMAT, "codec": fit.codec, "digest": fit.digest, "facts": facts}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in fit.tensors.items()}
    return save(tensors, metadata | {"seal": _seal(metadata, tensors)})


def _held(path: Path, digest: str) -> Fit | None:
    """The fit that lies there; ``None`` where none does, or a damaged one."""
    try:
        return _unpacked(path, digest)
    except (FileNotFoundError, ValueError):
        return None


def _unpacked(path: Path, digest: str) -> Fit:
    """``ValueError`` for what is not a fit of that digest as ``_packed`` wrote it, bit for bit."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise ValueError(f"not a safetensors file: {error}") from None
    seal = metadata.pop("seal", None)
    if metadata.get("agentkv") != _FIT_FORMAT or seal is None or not {"codec", "facts"} <= metadata.keys():
        raise ValueError("not a fit that this version of agentkv wrote")
    if seal != _seal(metadata, tensors) or metadata.get("digest") != digest:
        raise ValueError("its content or name was changed")
    return Fit(metadata["codec"], metadata["digest"], tensors, json.loads(metadata["facts"]))


def _seal(metadata: dict[str, str], tensors: dict[str, Any]) -> str:
    """Digest of all that a fit file says."""
    named = json.dumps([metadata, weights_digest_of_state_dict(tensors)], sort_keys=True)
    return blake3(named.encode()).hexdigest()


def _says(fit: Fit) -> tuple[str, str]:
    """What a fit is to a codec, without the facts about its making."""
    return fit.codec, weights_digest_of_state_dict(dict(fit.tensors))


def _make_folder(folder: Path) -> None:
    folder.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for made in (folder.parent, folder):
        if not made.is_dir():
            made.mkdir(mode=0o700, exist_ok=True)
            _sync(made.parent)
    for path in folder.glob(f"{_TEMPORARY}*"):
        # What a killed calibration left; a younger one may belong to another that runs now.
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()


def _write(path: Path, content: bytes) -> None:
    """Temporary name, fsync, rename; the folder's fsync is the caller's."""
    with _written(path.parent, content) as temporary:
        temporary.replace(path)


@contextmanager
def _written(folder: Path, content: bytes) -> Iterator[Path]:
    """A temporary file with that content, synced; gone afterwards where it was not renamed."""
    temporary = folder / f"{_TEMPORARY}{secrets.token_hex(8)}"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
