"""``agentkv sessions export`` and ``import``: a conversation as one file. Exporting loads no model."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentkv.cli.display import nbytes, out_console, print_json
from agentkv.cli.options import AsJson, Device, Dtype, HomeFolder, Model, Tenant, settings_from
from agentkv.errors import SessionNotFound

if TYPE_CHECKING:
    from agentkv.settings import Settings
    from agentkv.types import ExportReport, ImportReport

__all__ = ["export", "import_"]


def export(
    session_id: Annotated[str, typer.Argument(metavar="ID", help="sess_…")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Written as its owner's alone.")],
    home: HomeFolder = None,
    tenant: Tenant = "default",
    replace: Annotated[bool, typer.Option("--replace", help="A file that is there may give way.")] = False,
    allow_plain: Annotated[
        bool, typer.Option("--allow-plain", help="From an encrypted home all the same: the file is not encrypted.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a conversation with its stored KV into one file, to be imported into another home."""
    report = asyncio.run(_exported(settings_from(home=home), session_id, tenant, file, replace, allow_plain))
    if as_json:
        print_json({**asdict(report), "path": str(report.path)})
        return
    console = out_console()
    console.print(
        f"{report.path}: {report.tokens:,} tokens, {report.kv_tokens:,} of them with KV, {nbytes(report.nbytes)}",
        markup=False,
        soft_wrap=True,
    )
    if report.reason:
        console.print(f"the others are computed again after the import: {report.reason}", markup=False, soft_wrap=True)


async def _exported(
    settings: Settings, session_id: str, tenant: str, file: Path, replace: bool, allow_plain: bool
) -> ExportReport:
    from agentkv.cli.stored import is_empty, stored_home
    from agentkv.models.calibrations import load_calibration
    from agentkv.sessions.exporting import Exporter, check_plain_allowed

    if is_empty(settings):
        raise SessionNotFound(session_id)
    async with stored_home(settings) as stored:
        check_plain_allowed(stored.blobs, allow_plain)
        whole = await stored.repository.whole_session(session_id, tenant)

        interrupted = threading.Event()

        def go_on() -> None:
            if interrupted.is_set():
                raise KeyboardInterrupt

        def write() -> ExportReport:
            calibration = load_calibration(settings.home, whole.record.kv_fingerprint)
            exporter = Exporter(stored.blobs, settings.home, codecs=calibration.codecs(settings.max_kl))
            return exporter.write(whole, file, replace=replace, go_on=go_on)

        try:
            return await asyncio.to_thread(write)
        except asyncio.CancelledError:
            interrupted.set()
            raise


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `agentkv sessions export` wrote.")],
    home: HomeFolder = None,
    tenant: Tenant = "default",
    keep_id: Annotated[bool, typer.Option("--keep-id", help="Under its own id, not a new one.")] = False,
    model: Model = None,
    device: Device = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Take an exported conversation into this home. Loads the model that is to go on with it."""
    settings = settings_from(home=home, model=model, device=device, dtype=dtype)
    report = asyncio.run(_imported(settings, tenant, file, keep_id))
    if as_json:
        print_json(asdict(report))
        return
    console = out_console()
    console.print(
        f"{report.session_id}: {report.tokens:,} tokens, {report.kv_tokens:,} of them with KV, "
        f"{nbytes(report.nbytes)} on disk",
        soft_wrap=True,
    )
    if report.reason:
        console.print(f"the others are computed by its next turn: {report.reason}", markup=False, soft_wrap=True)


async def _imported(settings: Settings, tenant: str, file: Path, keep_id: bool) -> ImportReport:
    from agentkv.cli.pulling import pull_shown
    from agentkv.sessions.runtime import AgentKV

    await asyncio.to_thread(pull_shown, settings.model, settings)
    async with AgentKV(settings) as kv:
        session = await kv.tenant(tenant).import_(file, keep_id=keep_id)
        assert session.imported is not None
        return session.imported
