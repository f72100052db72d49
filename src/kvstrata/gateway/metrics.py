"""The gateway's numbers as Prometheus metrics.

Names of tenants and engines come from the settings, names of models from the engines; metering.py bounds their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from kvstrata.gateway.fleet import EngineState
from kvstrata.gateway.metering import Series
from kvstrata.observability.exposition import Values, metric_of
from kvstrata.observability.families import Family
from kvstrata.observability.logging import log_stats

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from kvstrata.gateway.parts import Parts

_WHOSE = ("tenant", "model", "engine")
GATEWAY_FAMILIES: dict[str, Family] = {
    "kvstrata_gateway_requests": Family(
        "counter",
        (*_WHOSE, "outcome"),
        "Requests that have ended, by outcome: `ok`, `client_error` (an engine's 4xx), `engine_error` (an engine's "
        "5xx, or an error inside a 200), `broke_off`, `cancelled` by the client, or the code of the gateway's refusal.",
    ),
    "kvstrata_gateway_ttft_seconds": Family(
        "histogram", _WHOSE, "Time from a request's arrival to the first byte of its answer's body."
    ),
    "kvstrata_gateway_itl_seconds": Family(
        "histogram", _WHOSE, "Time between two parts of a stream with events."
    ),
    "kvstrata_gateway_tpot_seconds": Family(
        "histogram", _WHOSE, "Mean time per token after the first, of each request."
    ),
    "kvstrata_gateway_e2e_seconds": Family(
        "histogram", _WHOSE, "Time from a request's arrival to the end of its answer."
    ),
    "kvstrata_gateway_tokens": Family(
        "counter",
        (*_WHOSE, "kind"),
        "Tokens that answers tell in their `usage`: `prompt`, `cached` (of those), `completion`.",
    ),
    "kvstrata_gateway_slo_requests": Family(
        "counter",
        ("tenant", "slo"),
        "Requests received, by class of service; those that were refused included.",
    ),
    "kvstrata_gateway_slo_met": Family(
        "counter",
        ("tenant", "slo"),
        "Requests that were answered within the times of their class of service.",
    ),
    "kvstrata_gateway_retries": Family(
        "counter", ("reason",), "Requests sent to a further engine, by what the engine before had done."
    ),
    "kvstrata_gateway_mistaken_prefixes": Family(
        "counter",
        ("engine",),
        "Requests of whose prompt an engine reports less than half as cached of what the gateway expected.",
    ),
    "kvstrata_gateway_prefix_pieces": Family("gauge", (), "Pieces of prompts whose engines are remembered."),
    "kvstrata_gateway_prompts": Family(
        "counter",
        ("model", "how"),
        "Prompts of text by how their token ids are known: by our own `tokenizer`, by an engine's `render`, or not: "
        "`late`, `unverified` (an engine's ids differ), `unsupported` (it has something that only the engine knows), "
        "`degraded`, `busy`, `unknown_model` (it has no tokenizer here).",
    ),
    "kvstrata_gateway_mistaken_tokens": Family(
        "counter",
        ("model", "engine"),
        "Prompts of which an engine reports another number of tokens than the gateway computed.",
    ),
    "kvstrata_gateway_tokens_verified": Family(
        "gauge",
        ("model", "engine", "feature"),
        "1 if an engine and our tokenizer make the same ids of prompts with this feature, else 0.",
    ),
    "kvstrata_gateway_tokens_degraded": Family(
        "gauge", ("model",), "1 if a model's ids were wrong too often, so that they are not used, else 0."
    ),
    "kvstrata_gateway_token_cache_bytes": Family(
        "gauge", (), "Memory for the token ids of earlier turns, in bytes."
    ),
    "kvstrata_gateway_known_blocks": Family(
        "gauge",
        ("engine",),
        "Blocks of an engine's own cache that its KV events tell of.",
    ),
    "kvstrata_gateway_kv_event_batches": Family(
        "counter", ("engine",), "Batches of KV events that were heard, those sent again included."
    ),
    "kvstrata_gateway_kv_event_gaps": Family(
        "counter", ("engine",), "Times that KV events of an engine were lost for good, or made no sense."
    ),
    "kvstrata_gateway_kv_events_thread": Family(
        "gauge",
        (),
        "1 while the thread that hears KV events runs, else 0: then nothing is known by events until a restart.",
    ),
    "kvstrata_gateway_other_gateways": Family("gauge", (), "Other gateways that are heard."),
    "kvstrata_gateway_others_in_flight": Family("gauge", (), "Requests of other gateways under way."),
    "kvstrata_gateway_shared": Family(
        "counter",
        ("what",),
        "Frames `sent` to other gateways, `unsent` since one did not take them, `heard` and `refused`; events `untold` "
        "since too many waited, and `ignored` since their engine is not known here or a bound was reached.",
    ),
    "kvstrata_gateway_controller_questions": Family(
        "counter",
        ("controller", "outcome"),
        "Prompts about which a controller was asked: `answered`, `late` (the request went on without), `failed`.",
    ),
    "kvstrata_gateway_controller_answer_seconds": Family(
        "histogram", ("controller",), "Time until answers came that were in time."
    ),
    "kvstrata_gateway_controller_up": Family(
        "gauge", ("controller",), "1 while a controller is connected and asked, else 0."
    ),
    "kvstrata_gateway_retry_budget": Family("gauge", (), "Retries that may be made now."),
    "kvstrata_gateway_engine_up": Family("gauge", ("engine",), "1 while an engine gets requests, else 0."),
    "kvstrata_gateway_engine_in_flight": Family("gauge", ("engine",), "Requests under way at an engine."),
    "kvstrata_gateway_in_flight": Family("gauge", (), "Requests under way."),
    "kvstrata_gateway_tenant_in_flight": Family("gauge", ("tenant",), "Requests of a tenant under way."),
    "kvstrata_gateway_tenant_used_tokens": Family(
        "gauge", ("tenant",), "Tokens that a tenant has used of its `tokens_burst`."
    ),
    "kvstrata_gateway_queued": Family(
        "gauge", ("tenant",), "Requests that wait in the gateway until an engine has room for them."
    ),
    "kvstrata_gateway_queued_bytes": Family("gauge", (), "Bytes of their bodies."),
    "kvstrata_gateway_queue_seconds": Family(
        "histogram",
        ("tenant",),
        "Time from arrival until an engine had room, or the request was refused or left, of requests that waited.",
    ),
    "kvstrata_gateway_http_connections": Family("gauge", (), "Open connections of clients."),
    "kvstrata_gateway_http_closed_connections": Family(
        "counter",
        ("why",),
        "Connections that the gateway closed: `idle` (the longest idle one, for a new one), `late` (its request did "
        "not arrive in time), `stalled` (its client read nothing), `stranger` (another user on a unix socket).",
    ),
    "kvstrata_gateway_log_lines_dropped": Family(
        "counter", (), "Log lines dropped because the reader of the log had stopped reading or was gone."
    ),
}
"""All families, in the order in which they are served."""


class GatewayCollector:
    """A collector for a prometheus_client CollectorRegistry."""

    def __init__(
        self, parts: Parts, numbers: Callable[[], Mapping[str, float]], http: Callable[[], Mapping[str, int]]
    ) -> None:
        """`numbers`: those of the families without labels. `http`: the port's counts."""
        self._parts = parts
        self._numbers = numbers
        self._http = http

    def collect(self) -> Iterable[Metric]:
        """All metric families now."""
        samples = self._samples()
        for name, family in GATEWAY_FAMILIES.items():
            yield metric_of(name, family, samples[name])

    def _samples(self) -> dict[str, Values]:
        meters, http, fleet, sharing = (
            self._parts.meters,
            self._http(),
            self._parts.fleet,
            self._parts.sharing,
        )
        heard = self._parts.residency.page()
        series = [(list(labels), one) for labels, one in sorted(meters.series.items())]
        found: dict[str, Values] = {
            "kvstrata_gateway_requests": _counted(series, lambda one: one.outcomes),
            "kvstrata_gateway_tokens": _counted(series, lambda one: one.tokens),
            "kvstrata_gateway_slo_requests": [
                (list(name), count) for name, count in sorted(meters.received.items())
            ],
            "kvstrata_gateway_slo_met": [(list(name), count) for name, count in sorted(meters.met.items())],
            "kvstrata_gateway_retries": [([why], count) for why, count in sorted(meters.retries.items())],
            "kvstrata_gateway_mistaken_prefixes": [
                ([name], count) for name, count in sorted(meters.mistaken.items())
            ],
            "kvstrata_gateway_known_blocks": [([name], row["blocks"]) for name, row in heard.items()],
            "kvstrata_gateway_kv_event_batches": [([name], row["batches"]) for name, row in heard.items()],
            "kvstrata_gateway_kv_event_gaps": [([name], row["gaps"]) for name, row in heard.items()],
            "kvstrata_gateway_shared": [
                ([what], count) for what, count in (sharing.counts() if sharing else {}).items()
            ],
            "kvstrata_gateway_engine_up": [
                ([one.name], float(one.state is EngineState.UP)) for one in fleet.engines.values()
            ],
            "kvstrata_gateway_engine_in_flight": [
                ([one.name], one.in_flight) for engine in fleet.engines.values() for one in engine.targets
            ],
            **self._of_tenants(),
            "kvstrata_gateway_http_connections": [([], http.get("connections", 0))],
            "kvstrata_gateway_http_closed_connections": [
                ([name.removeprefix("closed_")], count)
                for name, count in http.items()
                if name.startswith("closed_")
            ],
            "kvstrata_gateway_log_lines_dropped": [([], log_stats()["dropped_lines"])],
        }
        for name in ("ttft", "itl", "tpot", "e2e"):
            found[f"kvstrata_gateway_{name}_seconds"] = [
                (labels, getattr(one, name)) for labels, one in series
            ]
        found |= self._of_tokens() | self._of_controllers()
        for name, value in self._numbers().items():
            found[f"kvstrata_gateway_{name}"] = [([], value)]
        return found

    def _of_tenants(self) -> dict[str, Values]:
        tenants, admission = sorted(self._parts.door.uses().items()), self._parts.admission
        return {
            "kvstrata_gateway_tenant_in_flight": [([name], one.in_flight) for name, one in tenants],
            "kvstrata_gateway_tenant_used_tokens": [([name], one.used_tokens) for name, one in tenants],
            "kvstrata_gateway_queued": [([name], one.count) for name, one in sorted(admission.flows.items())],
            "kvstrata_gateway_queued_bytes": [([], admission.size_bytes)],
            "kvstrata_gateway_queue_seconds": [
                ([name], waited) for name, waited in sorted(admission.waited.items())
            ],
        }

    def _of_controllers(self) -> dict[str, Values]:
        links = self._parts.controllers.links
        return {
            "kvstrata_gateway_controller_questions": [
                ([one.url, outcome], one.counts[outcome])
                for one in links
                for outcome in ("answered", "late", "failed")
            ],
            "kvstrata_gateway_controller_answer_seconds": [([one.url], one.seconds) for one in links],
            "kvstrata_gateway_controller_up": [([one.url], float(one.asks)) for one in links],
        }

    def _of_tokens(self) -> dict[str, Values]:
        tokens = self._parts.tokens
        return {
            "kvstrata_gateway_prompts": [
                (list(name), count) for name, count in sorted(tokens.counts.items())
            ],
            "kvstrata_gateway_mistaken_tokens": [
                (list(name), count) for name, count in sorted(tokens.mistakes.items())
            ],
            "kvstrata_gateway_tokens_verified": [
                ([model, engine, feature], float(good)) for model, engine, feature, good in tokens.features()
            ],
            "kvstrata_gateway_tokens_degraded": [
                ([model], float(model in tokens.degraded)) for model in tokens.tokenizers
            ],
        }


def _counted(series: Iterable[tuple[list[str], Series]], of: Callable[[Series], Mapping[str, int]]) -> Values:
    return [([*labels, word], count) for labels, one in series for word, count in sorted(of(one).items())]
