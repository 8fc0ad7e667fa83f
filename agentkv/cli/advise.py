"""``agentkv advise``: settings that would serve a home better, and why."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from agentkv.cli.display import out_console, print_json
from agentkv.cli.options import AsJson, Device, Dtype, HomeFolder, Model, settings_from

if TYPE_CHECKING:
    from agentkv.policies.advisor import Observed
    from agentkv.sessions.observed import Past
    from agentkv.settings import Settings

__all__ = ["advise"]


def advise(
    home: HomeFolder = None, model: Model = None, device: Device = None, dtype: Dtype = None, as_json: AsJson = False
) -> None:
    """Look at a home's past and its settings, and say what would serve better. Changes nothing."""
    from dataclasses import asdict

    from agentkv.policies.advisor import advise as advised

    seen = _observed(settings_from(home=home, model=model, device=device, dtype=dtype))
    found = advised(seen)
    if as_json:
        print_json({"observed": asdict(seen), "advice": [asdict(advice) for advice in found]})
        return
    console = out_console()
    median, most, longest = seen.lengths
    console.print(
        f"{seen.sessions:,} sessions, {median:,} tokens in the median, {most:,} at the 95th percentile, {longest:,} at "
        f"most; up to {seen.together} used together",
        soft_wrap=True,
    )
    if not found:
        console.print("nothing would serve better than what is set")
    for advice in found:
        head = "look into it" if advice.setting is None else f"{advice.setting} = {advice.value}"
        console.print(f"[bold]{head}[/]\n  {advice.why}", soft_wrap=True, highlight=False)


def _observed(settings: Settings) -> Observed:
    from agentkv.cli.pulling import pull_shown
    from agentkv.engine.loading import load
    from agentkv.models.calibrations import load_calibration
    from agentkv.models.gate import choose
    from agentkv.policies.advisor import Observed
    from agentkv.sessions.opening import bytes_of
    from agentkv.sessions.sizes import device_memory, total_memory

    loaded = load(pull_shown(settings.model, settings), settings)
    stored = load_calibration(settings.home, loaded.fingerprints.kv).report
    best = None if stored is None else choose(stored, settings.max_kl)
    gate = () if stored is None else tuple(x.layout for x in stored.layouts if x.mean_kl <= settings.max_kl)
    past, used, disk = asyncio.run(_home(settings))
    memory = device_memory(loaded.adapter.device)
    return Observed(
        sessions=past.sessions,
        lengths=past.lengths,
        gap=past.gap,
        together=past.together,
        hit_rate=past.hit_rate,
        context=loaded.context_limit,
        token_bytes=loaded.adapter.geometry.nbytes(1),
        device_budget=bytes_of(settings.device_budget, memory),
        host_budget=bytes_of(settings.host_budget, total_memory()),
        disk_budget=disk,
        stored_bytes=used,
        memory=memory,
        full_share=past.full_share,
        layout=settings.layout,
        idle_codec=settings.idle_codec,
        calibrated=None if stored is None else "exact" if best is None else best.codec,
        live_gate=gate,
        tool_share=past.tool_share,
    )


async def _home(settings: Settings) -> tuple[Past, int, int]:
    from agentkv.cli.stored import is_empty, stored_home
    from agentkv.errors import InvalidRequest
    from agentkv.sessions.observed import past_of

    if is_empty(settings):
        raise InvalidRequest(f"nothing was ever stored in {settings.home}; choose another with --home")
    async with stored_home(settings) as home:
        return await past_of(home.repository), home.blobs.used_bytes(), home.blobs.budget_bytes
