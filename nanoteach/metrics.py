"""Stage 10. What the server tells Prometheus, under vLLM's names with another first word.

Knows: what is counted, and in which buckets. Does not know: who asks, or how steps are run.
"""

import itertools
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from nanoteach.async_engine import Observer
from nanoteach.types import EngineStats, RequestOutput

PREFIX = "nanoteach:"
SECONDS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5,
    0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip


class Metrics(Observer):
    """Counts what every step gives; the rest comes from the engine's own counts when asked."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.told: dict[str, int] = {}  # tokens of each request that were counted

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=self.registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(PREFIX + name, text, buckets=SECONDS, registry=self.registry)

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that began.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.success = counter("request_success", "Requests that ended.", "finished_reason")
        self.first = histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self.next = histogram("inter_token_latency_seconds", "From a token to the next.")
        self.whole = histogram("e2e_request_latency_seconds", "From arrival to the last token.")

    def stepped(self, outputs: list[RequestOutput]) -> None:
        """See `Observer.stepped`."""
        for output in outputs:
            times, first = output.token_times, output.time_to_first_token
            told = self.told.get(output.request_id, 0)
            self.told[output.request_id] = len(times)
            self.generation_tokens.inc(len(times) - told)
            assert first is not None
            if told == 0:
                self.first.observe(first)
                self.prompt_tokens.inc(len(output.prompt_token_ids))
            for before, time in itertools.pairwise(times[max(0, told - 1) :]):
                self.next.observe(time - before)
            if output.finished:
                self.whole.observe(first + times[-1] - times[0])
                self.ended(output.request_id, str(output.outputs[0].finish_reason))

    def ended(self, request_id: str, reason: str) -> None:
        """See `Observer.ended`."""
        self.told.pop(request_id, None)
        self.success.labels(reason).inc()

    def render(self, stats: EngineStats) -> bytes:
        """Prometheus' text format."""
        counts = CollectorRegistry()
        counts.register(EngineCounts(stats))
        return generate_latest(self.registry) + generate_latest(counts)


class EngineCounts:
    """A collector, in Prometheus' sense, of what the engine counts itself."""

    def __init__(self, stats: EngineStats) -> None:
        self.stats = stats

    def collect(self) -> Iterator[Metric]:
        """One metric after the other."""
        stats = self.stats
        for name, text, value in (
            ("num_requests_running", "Requests that hold blocks.", stats.num_running),
            ("num_requests_waiting", "Requests in the queue.", stats.num_waiting),
            (
                "kv_cache_usage_perc",
                "Share of the KV blocks that are held, 1 for all of them.",
                stats.num_used_blocks / stats.num_blocks,
            ),
        ):
            yield GaugeMetricFamily(PREFIX + name, text, value=value)
        for name, text, count in (
            ("num_preemptions", "Requests sent back to the queue.", stats.num_preemptions),
            ("prefix_cache_queries", "Tokens looked up.", stats.num_prefix_queries),
            ("prefix_cache_hits", "Tokens found.", stats.num_prefix_hits),
        ):
            yield CounterMetricFamily(PREFIX + name, text, value=count)
