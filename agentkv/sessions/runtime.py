"""The runtime: one home, one model, all its sessions."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self, TypeVar

from agentkv.errors import Closed, InvalidRequest
from agentkv.logs import Log
from agentkv.policies.residency import ResidencyPolicy, parse_residency
from agentkv.policies.retention import RetentionPolicy, parse_policy, policy_text
from agentkv.registry import load_plugins
from agentkv.sessions.waiting import finished
from agentkv.sessions.workers import start_workers
from agentkv.settings import Settings

if TYPE_CHECKING:
    from agentkv.engine.loading import LoadedModel
    from agentkv.models.calibrations import StoredCalibration
    from agentkv.sessions.control import Control
    from agentkv.sessions.db.repository import Repository
    from agentkv.sessions.events import LifecycleEvent
    from agentkv.sessions.home import Home
    from agentkv.sessions.manager import Sessions
    from agentkv.sessions.shared import Shared
    from agentkv.sessions.stats import RuntimeStats
    from agentkv.storage.blobs import BlobStore

__all__ = ["AgentKV"]

log = Log(__name__)

T = TypeVar("T")


class AgentKV:
    """An open runtime. ``async with AgentKV.open(model=…, home=…) as kv``, or ``kv = await AgentKV.open(…)`` and
    ``await kv.close()``.

    Every keyword is a field of ``agentkv.Settings``. Raises ``HomeLocked`` while another process has the
    home, ``ModelUnavailable`` where the model cannot be had, ``Unsupported`` for a model that cannot be right here.
    """

    sessions: Sessions

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._home: Home | None = None
        self._repository: Repository | None = None
        self._model: LoadedModel | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._watch: asyncio.Task[None] | None = None
        self._control: Control | None = None
        self._shared: Shared | None = None
        self._state = "new"
        self._opened = time.monotonic()

    @classmethod
    def open(cls, **settings: Any) -> Self:
        """A runtime that starts on ``async with`` or ``await``."""
        known = Settings.model_fields
        if isinstance(settings.get("default_policy"), RetentionPolicy):
            settings["default_policy"] = policy_text(settings["default_policy"])
        for name in settings:
            if name not in known:
                raise InvalidRequest(f"unknown setting {name!r}; known: {', '.join(sorted(known))}", param=name)
        try:
            return cls(Settings(**settings))
        except ValueError as error:
            raise InvalidRequest(f"settings: {error}") from error

    async def __aenter__(self) -> Self:
        return await self._start()

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    def __await__(self) -> Generator[Any, None, Self]:
        return self._start().__await__()

    @property
    def model(self) -> LoadedModel:
        """The loaded model. ``Closed`` when the runtime is not open."""
        if self._model is None:
            raise Closed("this runtime is not open")
        return self._model

    async def _start(self) -> Self:
        if self._state != "new":
            raise Closed("a runtime is opened once; make another with AgentKV.open")
        self._state = "open"
        try:
            await self._open()
        except BaseException:
            await self.close()
            raise
        return self

    async def _open(self) -> None:
        settings = self.settings
        for name, meant in settings.unknown_variables().items():
            log.warning("unknown_variable", name=name, meant=meant)
        await asyncio.to_thread(load_plugins)
        parse_policy(settings.default_policy)
        residency = parse_residency(settings.residency)
        # torch and transformers take seconds to import: not on the event loop.
        await asyncio.to_thread(_import_engine)
        from agentkv.models.calibrations import load_calibration
        from agentkv.sessions.control import Control
        from agentkv.sessions.db.repository import Repository
        from agentkv.sessions.hints import Hints
        from agentkv.sessions.home import Home
        from agentkv.sessions.manager import Sessions
        from agentkv.sessions.opening import bytes_of, open_store
        from agentkv.sessions.reporting import look
        from agentkv.sessions.shared import DEFAULT_TENANT, Shared

        def lock() -> bytes:
            self._home = Home(settings.home)
            return self._home.secret

        def start() -> ThreadPoolExecutor:
            self._executor = start_workers(max(2, os.cpu_count() or 2))
            return self._executor

        secret = await _taken(lock)
        self._repository = await Repository.open(settings.database_url)
        await self._repository.reset_states()
        executor = await _taken(start)
        loop = asyncio.get_running_loop()

        blobs = await loop.run_in_executor(executor, open_store, settings, secret)
        self._model = await _in_new_thread(lambda: _load_model(settings))
        calibration = await asyncio.to_thread(load_calibration, settings.home, self._model.fingerprints.kv)
        shared = self._shared = Shared(settings, self._model, self._repository)
        self.sessions = Sessions(shared, DEFAULT_TENANT)
        shared.tiers = self._tiers(blobs, calibration, residency)
        device = self.sessions.tiers.residency
        device.share = device.tokens_within(bytes_of(settings.adaptive_budget, device.budget))
        pin_budget = bytes_of(settings.pin_budget, self.sessions.tiers.device_budget)
        shared.hints = Hints(self.sessions.tiers, self.sessions.cores, pin_budget)
        await self._sweep(blobs)
        self._model.engine.start()
        self._watch = asyncio.create_task(self.sessions.tiers.watch(), name="agentkv-idle")
        model = self._model.name
        self._control = Control(settings.home, lambda: look(self.sessions, self._opened, model))
        await self._control.start()

    def _tiers(self, blobs: BlobStore, calibration: StoredCalibration, residency: ResidencyPolicy) -> Any:
        from agentkv.models.gate import auto_codec, layout_trouble
        from agentkv.sessions.attaching import Attaching
        from agentkv.sessions.opening import bytes_of
        from agentkv.sessions.restoring import ChunkReader
        from agentkv.sessions.sizes import device_memory, total_memory
        from agentkv.sessions.storing import ChunkWriter
        from agentkv.sessions.tiers import Tiers
        from agentkv.storage.host import HostTier
        from agentkv.storage.naming import TenantSalts

        assert self._model and self._repository and self._executor and self._home
        settings, model = self.settings, self._model
        codecs = calibration.codecs(settings.max_kl)
        auto, why = auto_codec(model.model_type, calibration.report, settings.max_kl, model=settings.model)
        log.info("idle_codec", auto=auto, detail=why)
        if model.layout.lossy and (trouble := layout_trouble(model.layout.lossy, calibration.report, settings.max_kl)):
            detail = f"{trouble}; `agentkv calibrate {settings.model}` measures it"
            log.warning("layout_not_measured", layout=model.layout.name, detail=detail)
        writer = ChunkWriter(
            self._repository,
            blobs,
            self._executor,
            geometry=model.adapter.geometry,
            kv_fingerprint=model.fingerprints.kv,
            salts=TenantSalts(self._home.secret),
            codecs=codecs,
            auto=auto,
            layout=model.layout.lossy,
        )
        host = HostTier(bytes_of(settings.host_budget, total_memory()))
        reader = ChunkReader(
            blobs,
            host,
            self._executor,
            model.layout,
            codecs,
            kv_fingerprint=model.fingerprints.kv,
            salts=writer.salts,
        )
        return Tiers(
            self._repository,
            blobs,
            host,
            writer,
            reader,
            Attaching(self._repository, blobs, writer, self._executor, forgets=model.forgets),
            model.layout,
            self._executor,
            self.sessions.cores,
            kv_fingerprint=model.fingerprints.kv,
            context=model.context_limit,
            device_budget=bytes_of(settings.device_budget, device_memory(model.adapter.device)),
            residency=residency,
            measured=settings.restore == "measured",
            most_waiting=settings.admission_queue,
            wait_seconds=settings.admission_seconds,
            idle_seconds=settings.idle_seconds,
            disk_seconds=settings.disk_seconds,
        )

    async def _sweep(self, blobs: BlobStore) -> None:
        """What a crash left: files that the index does not know are taken up where they continue a session's stored KV,
        deleted ones deleted, the others moved aside; rows without references are collected."""
        from agentkv.sessions.rebuilding import adopt_orphans

        assert self._repository and self._executor and self._home
        report = await adopt_orphans(self._repository, blobs, self._home.secret, self._executor)
        if report.files:
            log.info("swept", **asdict(report))
        await self.sessions.tiers.writer.collect_garbage()

    def tenant(self, name: str) -> Sessions:
        """The sessions of one tenant; ``sessions`` are those of tenant ``default``. All share model and budgets.

        Another tenant's session is ``SessionNotFound``, and no tenant is served from KV that another one has computed.
        """
        from agentkv.sessions.manager import Sessions
        from agentkv.sessions.shared import check_tenant

        if self._shared is None:
            raise Closed("this runtime is not open")
        return Sessions(self._shared, check_tenant(name))

    def stats(self) -> RuntimeStats:
        """Sessions by state, bytes by tier against their budgets, tokens, restores, time saved. Reads no disk."""
        from agentkv.sessions.reporting import runtime_stats

        return runtime_stats(self.sessions, self._opened)

    def metrics(self) -> bytes:
        """``stats`` in Prometheus' text format, base units, without session ids."""
        from agentkv.sessions.metrics import exposition

        return exposition(self.stats)

    def events(self) -> AsyncIterator[LifecycleEvent]:
        """What happens to sessions from now on, until the runtime closes: restored, demoted, evicted, fallback …"""
        return self.sessions.tiers.observer.events.read()

    async def flush(self) -> None:
        """Returns once the KV of every committed turn is on disk, or its trouble is noted. Waits for running turns."""
        await self.sessions.flush()

    async def close(self) -> None:
        """Cancel running turns, write behind what is live, give everything back. Idempotent."""
        if self._state == "closed":
            return
        self._state = "closed"
        # Last in, first out; each is given back even where another refuses.
        async with AsyncExitStack() as stack:
            if self._home is not None:
                stack.push_async_callback(asyncio.to_thread, self._home.close)
            if self._repository is not None:
                stack.push_async_callback(self._repository.close)
            if self._executor is not None:
                stack.push_async_callback(asyncio.to_thread, self._executor.shutdown)
            if self._model is not None:
                stack.push_async_callback(self._model.engine.stop)
                self._model = None
            if hasattr(self, "sessions") and hasattr(self.sessions, "tiers"):
                stack.callback(self.sessions.tiers.observer.events.close)
                stack.push_async_callback(self.sessions.close)
            if self._control is not None:
                stack.push_async_callback(self._control.stop)
            if self._watch is not None:
                self._watch.cancel()
                await asyncio.wait([self._watch])


def _import_engine() -> None:
    import agentkv.engine.loading
    import agentkv.sessions.manager
    import agentkv.sessions.metrics  # noqa: F401

    load_plugins()  # of what the engine brings: codecs, layouts, tool formats


async def _taken(work: Callable[[], T]) -> T:
    """``work``, off the event loop. It takes what is to be given back: cancelled meanwhile, it ends first."""
    taking = asyncio.ensure_future(asyncio.to_thread(work))
    if (cancelled := await finished(taking)) is not None:
        raise cancelled
    return taking.result()


async def _in_new_thread(work: Callable[[], T]) -> T:
    """Run ``work`` in a thread that ends with it.

    A thread that has computed in parallel keeps OpenMP's workers for as long as it lives. With more of them than cores
    they stop waiting actively, and every parallel region of the model thread would begin with waking one.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # whoever waits can go; what the thread brings is let go then

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="agentkv-load", daemon=True).start()
    return await asyncio.wrap_future(done)


def _load_model(settings: Settings) -> LoadedModel:
    from agentkv.engine.loading import load
    from agentkv.models import pull

    return load(pull(settings.model, settings), settings)
