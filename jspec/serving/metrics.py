"""Counts and times for Prometheus, by vLLM's names."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from jspec.common.timing import compile_clock
from jspec.serving.job import CANCELLED, EXPIRED, Job, Update
from jspec.serving.scheduler import Scheduler

_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
# Prometheus adds `_total` to the name of a counter.
_COUNTERS = {
    "spec_decode_num_drafts": "Rounds in which drafts were proposed.",
    "spec_decode_num_draft_tokens": "Drafts proposed.",
    "spec_decode_num_accepted_tokens": "Drafts accepted.",
    "num_preemptions": "Answers that lost their slots for want of pages.",
    "prompt_tokens": "Tokens of prompts read.",
    "generation_tokens": "Tokens of answers.",
    "prefix_cache_queries": "Tokens of prompts that were looked up among earlier ones.",
    "prefix_cache_hits": "Tokens of them that need not be read again.",
}
# Reasons why answers end, and what vLLM calls them.
_REASONS = {"eos": "stop", EXPIRED: "length", CANCELLED: "abort", "failed": "error"}
_HISTOGRAMS = {
    "time_to_first_token_seconds": "From a request's arrival to its first token.",
    "inter_token_latency_seconds": "Between tokens of an answer: a visit's seconds, shared by the "
    "tokens that it brought.",
    "request_queue_time_seconds": "From a request's arrival to its slot.",
    "e2e_request_latency_seconds": "From a request's arrival to its end.",
}


class Metrics:
    """The metrics of a server; every series has the label `model_name`."""

    def __init__(self, model_name: str, scheduler: Scheduler) -> None:
        self._registry, self._model = CollectorRegistry(), model_name
        self._scheduler, self._num_paused = scheduler, 0
        self._last: dict[Job, float] = {}  # moment of the newest token of each answer in progress
        labels = {"labelnames": ["model_name"], "registry": self._registry}
        self._counters = {
            name: Counter(f"vllm:{name}", about, **labels).labels(model_name)
            for name, about in _COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(f"vllm:{name}", about, buckets=_SECONDS, **labels).labels(model_name)
            for name, about in _HISTOGRAMS.items()
        }
        for name, about, read in (
            ("vllm:num_requests_running", "Slots that are taken.", lambda: scheduler.num_running),
            ("vllm:num_requests_waiting", "Requests without slot.", lambda: scheduler.num_waiting),
            ("vllm:kv_cache_usage_perc", "Pages that slots hold; 1 is all.",
             lambda: scheduler.slots.usage),
            ("jspec:num_slots", "Slots, taken or free.", lambda: scheduler.num_slots),
            ("jspec:prefix_cache_bytes", "Of pages.", lambda: scheduler.slots.tree.num_bytes),
            ("jspec:prefix_cache_evictions", "Pages dropped for other prompts, so far.",
             lambda: scheduler.slots.tree.num_evicted),
            ("jspec:num_compiled_programs", "Since the process began.",
             lambda: compile_clock().num_programs),
        ):  # fmt: skip
            Gauge(name, about, **labels).labels(model_name).set_function(read)
        self._positions = self._labelled(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafts accepted, by place.", "position"
        )
        self._ends = self._labelled(
            "vllm:request_success", "Answers that have ended.", "finished_reason"
        )

    def _labelled(self, name: str, about: str, label: str) -> Counter:
        return Counter(name, about, ["model_name", label], registry=self._registry)

    def observe(self, update: Update) -> None:
        """Counts what an update brings."""
        for a_round in update.rounds:
            self._counters["spec_decode_num_drafts"].inc(a_round.num_proposed > 0)
            self._counters["spec_decode_num_draft_tokens"].inc(a_round.num_proposed)
            self._counters["spec_decode_num_accepted_tokens"].inc(a_round.num_accepted)
            for position in range(a_round.num_accepted):
                self._positions.labels(self._model, position).inc()
        job, num_new = update.job, len(update.chunk.token_ids)
        if num_new:
            self._counters["generation_tokens"].inc(num_new)
            self._observe_times(job, num_new, update.moment)
        if update.chunk.result is not None:
            self._last.pop(job, None)
            reason = update.chunk.result.finish_reason
            self._ends.labels(self._model, _REASONS.get(reason, reason)).inc()
            self._see("e2e_request_latency_seconds", update.moment - job.submitted)

    def _observe_times(self, job: Job, num_new: int, moment: float) -> None:
        if job not in self._last:
            assert job.started is not None
            self._counters["prompt_tokens"].inc(len(job.row.prompt))
            self._counters["prefix_cache_queries"].inc(len(job.row.prompt))
            self._counters["prefix_cache_hits"].inc(job.num_cached)
            self._see("request_queue_time_seconds", job.started - job.submitted)
            self._see("time_to_first_token_seconds", moment - job.submitted)
        else:
            for _ in range(num_new):
                self._see("inter_token_latency_seconds", (moment - self._last[job]) / num_new)
        self._last[job] = moment

    def _see(self, name: str, seconds: float) -> None:
        self._histograms[name].observe(seconds)

    def text(self) -> bytes:
        """Returns everything in the text format of Prometheus."""
        num_new = self._scheduler.num_paused - self._num_paused
        self._counters["num_preemptions"].inc(num_new)
        self._num_paused += num_new
        return generate_latest(self._registry)
