"""What ``agentkv doctor`` looks at. No home is created; one that is there is opened as every command opens it."""

from __future__ import annotations

import asyncio
import os
import platform
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentkv.errors import AgentKVError, HomeLocked
from agentkv.policies.retention import parse_policy

if TYPE_CHECKING:
    from agentkv.engine.loading import LoadedModel
    from agentkv.sessions.observed import Reuse
    from agentkv.settings import Settings

__all__ = ["examine"]

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "sqlalchemy", "aiosqlite", "aiohttp", "zstandard")
_COMPUTED_AGAIN = {
    "unstored": "let processes end by `await kv.close()`, or call `await kv.flush()` before they are killed",
    "fingerprint": "the model was another one, in its weights, dtype or rope; this passes",
    "missing": "find out what deletes chunk files, or why none were written",
    "unreachable": "the store that blobs_url names did not answer",
}
"""What to do where much of the known KV was not used, by the first word of the reason."""
_FAULTY = "`agentkv store verify` names the files that are faulty"
_SLOW_DTYPE = 1.5
"""Times float32: less is no reason to pay twice the memory."""
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_tile", "bf16", "asimd", "sve")


class _Checkup:
    """Collects facts, and on the way what is wrong."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.problems: list[dict[str, str]] = []
        self.warnings: list[dict[str, str]] = []
        self.notes: list[str] = []

    def problem(self, what: str, do: str) -> None:
        self.problems.append({"what": " ".join(what.split()), "do": do})

    def reuse(self, seen: Reuse) -> dict[str, Any]:
        """How much of what recent turns could have reused they did."""
        from agentkv.policies.advisor import USUAL_HIT_RATE

        if seen.rate is not None and seen.rate < USUAL_HIT_RATE:
            again = [
                f"{tokens:,} were computed again ({reason}): {_COMPUTED_AGAIN.get(reason, _FAULTY)}"
                for reason, tokens in list(seen.computed_again.items())[:3]
            ]
            self.warnings.append(
                {
                    "what": f"the last {seen.turns:,} turns reused {seen.reused_tokens:,} of {seen.known_tokens:,} "
                    f"tokens that were known already, {seen.rate:.0%}; {USUAL_HIT_RATE:.0%} and more is usual",
                    "do": "; ".join(again) or "`agentkv store verify` checks stored KV",
                }
            )
        rate = None if seen.rate is None else round(seen.rate, 4)
        return {"known_tokens": seen.known_tokens, "reused_tokens": seen.reused_tokens, "hit_rate": rate}

    def versions(self) -> dict[str, Any]:
        from agentkv import __version__

        found: dict[str, Any] = {"agentkv": __version__, "python": platform.python_version()}
        for package in _PACKAGES:
            try:
                found[package] = version(package)
            except PackageNotFoundError:
                found[package] = None
                self.problem(f"the package {package} is not installed", "pip install --force-reinstall agentkv")
        return found | {"sqlite": sqlite3.sqlite_version}

    def machine(self, *, fast: bool) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "system": f"{platform.system()} {platform.machine()}",
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "cpu_flags": _cpu_flags(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "memory_free_bytes": _memory_available(),
            "device": self.settings.device,
        }
        if not fast:
            from agentkv.engine.loading import pick_device

            try:
                facts["device"] = str(pick_device(self.settings.device))
            except AgentKVError as error:
                self.problem(str(error), "set AGENTKV_DEVICE=auto, or pass --device cpu")
        return facts

    def choices(self) -> None:
        """Whether what the settings name is there."""
        from agentkv.api.settings import ServerSettings
        from agentkv.codecs import CODECS
        from agentkv.kv import LAYOUTS
        from agentkv.policies.residency import parse_residency

        settings = self.settings
        for name, meant in {**settings.unknown_variables(), **ServerSettings.unknown_variables()}.items():
            hint = f"did you mean {meant}?" if meant else "unset it, or look for the right name in docs/operations.md"
            self.warnings.append({"what": f"the environment has {name}, which is no setting", "do": hint})
        chosen: list[tuple[str, str, Callable[[str], Any]]] = [
            ("default_policy", "full", parse_policy),
            ("residency", "cost", parse_residency),
            ("idle_codec", "auto", lambda name: name == "auto" or CODECS.get(name)),
            ("layout", "auto", lambda name: name == "auto" or LAYOUTS.get(name)),
        ]
        for field, default, look in chosen:
            try:
                look(getattr(settings, field))
            except AgentKVError as error:
                self.problem(f"{field}: {error}", f"set AGENTKV_{field.upper()}={default}, or mend it in agentkv.toml")

    def home(self) -> dict[str, Any]:
        home, settings = self.settings.home, self.settings
        facts: dict[str, Any] = {"path": str(home), "exists": home.exists(), "used_by": None, "free_bytes": None}
        # ``free_bytes`` stays None where the home cannot be used at all.
        standing = home
        while not standing.exists() and standing != standing.parent:
            standing = standing.parent
        if not standing.is_dir():
            self.problem(
                f"{standing} is not a folder", "move it away, or choose another home with --home or AGENTKV_HOME"
            )
            return facts
        if not os.access(standing, os.R_OK | os.W_OK | os.X_OK):
            self.problem(f"{standing} cannot be read and written by this user", f"chown or chmod u+rwx {standing}")
            return facts
        if home.exists():
            facts["mode"] = f"{home.stat().st_mode & 0o777:04o}"
        for name in ("", "agentkv.db", "secret", "blobs"):
            path = home / name
            if path.exists() and path.stat().st_mode & 0o077:
                self.problem(f"{path} is open to other users", f"chmod go-rwx {path}")
        stat = os.statvfs(standing)
        free, total = stat.f_frsize * stat.f_bavail, stat.f_frsize * stat.f_blocks
        facts["free_bytes"] = free
        margin = settings.disk_margin
        wanted = margin if isinstance(margin, int) else int(total * float(margin.rstrip("%")) / 100)
        if free < wanted:
            self.problem(
                f"{free:,} bytes are free at {standing}, disk_margin keeps {wanted:,}: KV will not reach the disk",
                "free disk space, delete sessions (`agentkv sessions rm`), or lower AGENTKV_DISK_MARGIN",
            )
        return facts

    def database(self) -> dict[str, Any]:
        """SQLite is read directly and read-only, so that it can be looked at while another process has the home."""
        settings = self.settings
        if settings.database is not None:
            return {"url": settings.database.split("@")[-1]}
        path = settings.home / "agentkv.db"
        facts: dict[str, Any] = {"path": str(path), "exists": path.is_file()}
        if not facts["exists"]:
            return facts
        facts["file_bytes"] = path.stat().st_size
        try:
            with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=5.0)) as db:
                found = [row[0] for row in db.execute("PRAGMA quick_check(5)")]
                facts["integrity"] = "; ".join(found)
        except sqlite3.Error as error:
            facts["integrity"] = str(error)
        if facts["integrity"] != "ok":
            self.problem(
                f"the database {path} is damaged: {facts['integrity']}",
                "stop every agentkv process, copy the home, then restore agentkv.db from a backup, or try `.recover`",
            )
        return facts

    async def storage(self, home: dict[str, Any]) -> dict[str, Any] | None:
        """Sessions and chunk files, where the home can be had."""
        from agentkv.cli.stored import is_empty, stored_home
        from agentkv.sessions.observed import recent_reuse

        if not home["exists"] or is_empty(self.settings):
            return None
        try:
            async with stored_home(self.settings) as stored:
                repository, there = stored.repository, dict(stored.blobs.list())
                missing = await repository.known_chunk_ids() - there.keys()
                facts = {
                    "schema": await repository.version(),
                    "sessions": await repository.count_sessions(),
                    "chunks": len(there),
                    "chunk_bytes": sum(there.values()),
                    "all_bytes": stored.blobs.used_bytes(),
                    "missing_chunks": len(missing),
                    "quarantined": stored.blobs.sweep().quarantined,
                }
                facts |= self.reuse(await recent_reuse(repository))
        except HomeLocked as error:
            home["used_by"] = error.pid
            self.notes.append(f"the home is in use by process {error.pid} on {error.host}: sessions were not counted")
            return None
        except AgentKVError as error:
            self.problem(str(error), "see the database and home above; a copy of the home is a backup")
            return None
        if missing:
            self.problem(
                f"{len(missing)} chunk files that sessions need are missing from "
                f"{self.settings.blobs_url or self.settings.blobs_dir}",
                "nothing is lost: the next turn of those sessions recomputes them. Find out what deletes files there",
            )
        if facts["quarantined"]:
            self.notes.append(f"{facts['quarantined']} damaged or unknown chunk files lie in quarantine")
        return facts

    def model(self) -> dict[str, Any]:
        from agentkv.models import resolve

        name = self.settings.model
        facts: dict[str, Any] = {"name": name, "here": False}
        try:
            found = resolve(name, self.settings)
        except AgentKVError as error:
            self.problem(str(error), "choose another model with --model or AGENTKV_MODEL")
            return facts
        if found is None:
            self.problem(f"the model {name!r} is not on this machine", f"agentkv models pull {name}")
            return facts
        where = str(found.path)
        return facts | {
            "here": True,
            "path": where,
            "source": found.source,
            "licence": found.licence,
            "bytes": found.nbytes,
        }

    def load(self) -> LoadedModel | None:
        """The model, as a runtime would have it; ``None`` where it is not here or will not load."""
        from agentkv.engine.loading import load
        from agentkv.models import resolve

        try:
            found = resolve(self.settings.model, self.settings)
            return None if found is None else load(found, self.settings)
        except AgentKVError as error:
            self.problem(str(error), "delete the model and pull it again, or choose another with --model")
            return None

    def bits(self, loaded: LoadedModel) -> dict[str, Any]:
        """Whether a row's bits depend on its neighbours (DESIGN §5)."""
        from agentkv.engine.selfcheck import rows_do_not_matter

        report = rows_do_not_matter(loaded.adapter, loaded.layout)
        if not report.ok:
            advice = "" if report.dtype == "float32" else "; --dtype float32 makes that far less likely"
            self.notes.append(
                f"on this machine a {report.dtype} logit differs by up to {report.max_difference:.2g} in steps of "
                f"{', '.join(map(str, report.differing))} rows: a reply may depend on what else runs{advice}"
            )
        return {"ok": report.ok, **asdict(report)}

    def speed(self, loaded: LoadedModel) -> dict[str, Any]:
        """Whether the dtype that the model runs in suits this machine."""
        from agentkv.engine.products import product_rates

        rates = product_rates(loaded.adapter.model.dtype, loaded.adapter.device)
        if rates.slower > _SLOW_DTYPE:
            self.warnings.append(
                {
                    "what": f"matrix products in {rates.dtype} are {rates.slower:.1f} times slower here than in "
                    f"float32 ({rates.gflops:,.0f} against {rates.gflops_float32:,.0f} GFLOP/s): they are emulated",
                    "do": "set AGENTKV_DTYPE=float32, or pass --dtype float32: prefill is then faster by up to that "
                    "factor, weights and KV take twice the memory, and what is stored already is computed again",
                }
            )
        return asdict(rates)

    def codec(self, loaded: LoadedModel) -> dict[str, Any]:
        """What stored KV of this model goes through, and what ``auto`` goes by."""
        from agentkv.models.calibrations import load_calibration
        from agentkv.models.gate import auto_codec, fragile, layout_trouble

        settings = self.settings
        stored = load_calibration(settings.home, loaded.fingerprints.kv)
        auto, reason = auto_codec(loaded.model_type, stored.report, settings.max_kl, model=settings.model)
        self.notes.extend(stored.warnings)
        chosen = settings.idle_codec
        if chosen == "auto" and stored.report is None:
            self.notes.append(f"idle_codec auto means {auto}: {reason}")
        if loaded.layout.lossy and (trouble := layout_trouble(loaded.layout.lossy, stored.report, settings.max_kl)):
            self.notes.append(f"{trouble}; `agentkv calibrate {settings.model}` measures it")
        return {
            "idle_codec": chosen,
            "auto_means": auto,
            "because": reason,
            "calibrated": stored.report is not None,
            "fragile_family": fragile(loaded.model_type),
            "model_type": loaded.model_type,
            "max_kl": settings.max_kl,
        }


def examine(settings: Settings, *, fast: bool) -> dict[str, Any]:
    """All facts as JSON values, with ``problems`` and ``warnings`` (``what`` is wrong, what to ``do``) and ``notes``.

    Blocking. A warning is no fault of this installation or home: ``ok`` does not depend on it.
    """
    check = _Checkup(settings)
    versions = check.versions()
    home = check.home()
    usable = home["free_bytes"] is not None
    database = check.database() if usable else {}
    sound = usable and database.get("integrity", "ok") == "ok"
    machine = check.machine(fast=fast)
    check.choices()
    storage = asyncio.run(check.storage(home)) if sound else None
    model = check.model() if usable else {}
    loaded = None if fast or not usable else check.load()
    report = {
        "versions": versions,
        "machine": machine,
        "home": home,
        "database": database,
        "storage": storage,
        "model": model,
        "bits": None if loaded is None else check.bits(loaded),
        "speed": None if loaded is None else check.speed(loaded),
        "codec": None if loaded is None else check.codec(loaded),
    }
    return {
        **report,
        "notes": check.notes,
        "warnings": check.warnings,
        "problems": check.problems,
        "ok": not check.problems,
    }


def _cpu_flags() -> list[str] | None:
    """Those that matter for the speed of bf16 and int8; ``None`` where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    flags = next((line.split(":")[1].split() for line in lines if line.lower().startswith(("flags", "features"))), [])
    return [flag for flag in _CPU_FLAGS if flag in flags]


def _memory_available() -> int | None:
    if sys.platform != "linux":
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
