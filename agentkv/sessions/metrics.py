"""A runtime's statistics as Prometheus metrics: made when they are asked for, in base units, without session ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agentkv.sessions.stats import RuntimeStats

__all__ = ["exposition"]


class _Snapshot(Collector):
    def __init__(self, stats: Callable[[], RuntimeStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        return _metrics(self._stats())


def exposition(stats: Callable[[], RuntimeStats]) -> bytes:
    """The metrics in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(stats))
    return generate_latest(registry)


def _metrics(stats: RuntimeStats) -> Iterator[Metric]:
    yield _gauge("uptime_seconds", "Since the runtime opened.", stats.uptime)
    yield _labelled_gauge("sessions", "Sessions touched since then, by state.", "state", stats.sessions)
    used = {name: tier.used for name, tier in stats.tiers.items()}
    budget = {name: tier.budget for name, tier in stats.tiers.items()}
    yield _labelled_gauge("tier_used_bytes", "Bytes in a tier, everything counted.", "tier", used)
    yield _labelled_gauge("tier_budget_bytes", "Most bytes in a tier.", "tier", budget)
    yield _gauge("turns_running", "Turns under way.", stats.running)
    yield _gauge("turns_waiting", "Turns that wait for device memory.", stats.waiting)
    yield _gauge("storage_degraded", "1 while the disk refuses writes.", float(stats.storage_error is not None))
    yield _counter("turns", "Committed turns.", stats.turns)
    yield _counter("prompt_tokens", "Tokens of prompts, held ones included.", stats.prompt_tokens)
    yield _counter("known_tokens", "Tokens whose KV the turn before had left.", stats.known_tokens)
    yield _counter("cached_tokens", "Of which not computed again.", stats.cached_tokens)
    yield _counter("completion_tokens", "Generated tokens.", stats.completion_tokens)
    yield _counter("computed_tokens", "Rows that the model computed.", stats.computed_tokens)
    yield _counter("steps", "Model steps.", stats.steps)
    yield _gauge("saved_seconds", "Expected prefill time of what was restored, less the restores.", stats.seconds_saved)
    restores = CounterMetricFamily("agentkv_restores", "Restores, by source and outcome.", labels=["source", "outcome"])
    for key, count in sorted(stats.restores.items()):
        source, _, outcome = key.partition(":")
        restores.add_metric([source, outcome], count)
    yield restores
    fallbacks = CounterMetricFamily("agentkv_fallbacks", "Stored KV that was not used, by reason.", labels=["reason"])
    for reason, count in sorted(stats.fallbacks.items()):
        fallbacks.add_metric([reason], count)
    yield fallbacks


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"agentkv_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"agentkv_{name}", text, value=value)


def _labelled_gauge(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(f"agentkv_{name}", text, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family
