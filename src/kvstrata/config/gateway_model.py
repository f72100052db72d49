"""Settings of the gateway."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvstrata.config.common_model import HTTP_HOST, LIMIT, NAME, ListenSettings
from kvstrata.config.gateway_controllers_model import GatewayControllersSettings
from kvstrata.config.gateway_engines_model import EngineSettings, EnginesFrom
from kvstrata.config.log_model import LogFormat, LogLevel


class GatewayHttpSettings(ListenSettings, frozen=True, kw_only=True):
    """Settings of the port that clients use instead of an engine's."""

    host: Annotated[str, Meta(min_length=1, description=HTTP_HOST)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535, description="Port; 0 takes a free one.")] = 8090
    token_file: Annotated[
        str,
        Meta(
            description="File with the bearer token of operators, who may ask for /metrics and /gateway/…, readable by "
            "its owner only. Empty: a token is made at each start, whose file the log names."
        ),
    ] = ""
    max_connections: Annotated[
        int,
        Meta(
            ge=8,
            le=1_000_000,
            description="Connections of clients; a further one closes the one that has been idle longest. Each needs "
            "two descriptors of `ulimit -n`.",
        ),
    ] = 16_384
    max_body_mb: Annotated[
        float, Meta(gt=0, le=1_024, description="Largest body of a request, in MiB; larger ones get 413.")
    ] = 64.0
    arrival_s: Annotated[
        float,
        Meta(
            extra=LIMIT,
            gt=0,
            le=3_600,
            description="Time in which a request must have arrived whole, in seconds.",
        ),
    ] = 60.0
    stalled_s: Annotated[
        float,
        Meta(
            extra=LIMIT,
            gt=0,
            le=3_600,
            description="A client that reads nothing of its answer for so long is cut, in seconds.",
        ),
    ] = 60.0


class SloSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A class of service: what a request must reach to count as good. 0: any time is good."""

    name: Annotated[
        str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$", extra=NAME, description="Name of the class.")
    ]
    ttft_ms: Annotated[
        float, Meta(ge=0, le=86_400_000, description="Longest time to the first token, in milliseconds.")
    ] = 0.0
    tpot_ms: Annotated[
        float,
        Meta(
            ge=0, le=86_400_000, description="Longest mean time per token after the first, in milliseconds."
        ),
    ] = 0.0
    e2e_ms: Annotated[
        float,
        Meta(ge=0, le=86_400_000, description="Longest time to the end of the answer, in milliseconds."),
    ] = 0.0
    shed: Annotated[
        bool,
        Meta(
            description="Refuse a request with 429 and Retry-After when, by the measured rates and the queues, no "
            "engine can give its first token within `ttft_ms`. Needs the policy `ttft`. An engine without requests "
            "refuses none."
        ),
    ] = False


class GatewayTenantSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant, known by its API key."""

    name: Annotated[
        str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$", extra=NAME, description="Name of the tenant.")
    ]
    key_file: Annotated[
        str,
        Meta(
            min_length=1,
            description="File with the API key that clients send as `Authorization: Bearer KEY`, readable by its owner "
            "only.",
        ),
    ]
    requests_per_s: Annotated[
        float,
        Meta(ge=0, le=1_000_000, description="Requests a second on average; more get 429. 0: any number."),
    ] = 0.0
    burst: Annotated[
        int,
        Meta(ge=1, le=1_000_000, description="Requests that may come at once before `requests_per_s` holds."),
    ] = 10
    max_in_flight: Annotated[
        int,
        Meta(ge=0, le=1_000_000, description="Requests under way at a time; more get 429. 0: any number."),
    ] = 0
    tokens_per_s: Annotated[
        float,
        Meta(
            ge=0,
            le=1e9,
            description="Tokens a second on average, of prompts and answers together; more get 429. 0: any number.",
        ),
    ] = 0.0
    tokens_burst: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000_000,
            description="Tokens that may be used at once before `tokens_per_s` holds. A request that takes more comes "
            "in when nothing else is used.",
        ),
    ] = 100_000
    slo: Annotated[
        str, Meta(description="Class of service of requests without a header `X-SLO-Class`; empty: none.")
    ] = ""
    weight: Annotated[
        float,
        Meta(
            gt=0,
            le=1_000,
            description="Share of the engines' work beside other tenants' while requests wait (`queue`): twice the "
            "weight gets twice the tokens.",
        ),
    ] = 1.0
    max_priority: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000,
            description="Highest priority among its own requests that one may claim by the header `X-Priority`, whose "
            "steps each count as an arrival 1 s earlier; more counts as this.",
        ),
    ] = 0


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests wait in the gateway while every engine that could serve them has enough to do."""

    enabled: Annotated[
        bool, Meta(description="Whether they do. Needs the policy `ttft`, and does not go with the picker.")
    ] = False
    ahead_s: Annotated[
        float,
        Meta(
            ge=0,
            le=60,
            description="Work that an engine is sent in advance, in seconds of computing prompts; two prompts in any "
            "case. More makes the order of waiting requests count less.",
        ),
    ] = 0.2
    max_requests: Annotated[
        int, Meta(ge=1, le=65_536, description="Requests that wait at most; further ones get 429.")
    ] = 1_024


class TimeoutSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long the gateway waits for an engine."""

    first_byte_s: Annotated[
        float,
        Meta(
            extra=LIMIT,
            gt=0,
            le=86_400,
            description="From sending a request to the first byte of the answer's body, in seconds.",
        ),
    ] = 600.0
    silence_s: Annotated[
        float,
        Meta(extra=LIMIT, gt=0, le=86_400, description="Between two parts of an answer's body, in seconds."),
    ] = 120.0


class RetrySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a request is sent to another engine: only before the first byte of its answer was passed on."""

    budget_share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Retries as a share of all requests; beyond it (and ten at once) a failure is passed on, so "
            "that retries cannot add to an overload.",
        ),
    ] = 0.2


class HealthSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the gateway knows which engines serve."""

    probe_s: Annotated[
        float,
        Meta(
            ge=0.05,
            le=3_600,
            description="Time between two probes of an engine (/health, /v1/models), in seconds.",
        ),
    ] = 5.0
    timeout_s: Annotated[
        float, Meta(extra=LIMIT, gt=0, le=3_600, description="Time for a probe's answer, in seconds.")
    ] = 3.0
    failures: Annotated[
        int,
        Meta(
            ge=1,
            le=100,
            description="Probes in a row that must fail before an engine gets no more requests. A refused connection "
            "counts at once.",
        ),
    ] = 2
    abandon_s: Annotated[
        float,
        Meta(
            extra=LIMIT,
            gt=0,
            le=86_400,
            description="Time without an answered probe after which requests that still wait for an engine's first "
            "byte are sent to others, in seconds.",
        ),
    ] = 30.0
    slow_start_s: Annotated[
        float,
        Meta(
            ge=0,
            le=3_600,
            description="Time after its return in which an engine's share of requests grows from a quarter to its full "
            "share, in seconds.",
        ),
    ] = 10.0


class PickerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The gRPC port on which Envoy asks which engine gets a request (`ext_proc`)."""

    enabled: Annotated[bool, Meta(description="Open the port. Needs the extra `picker`.")] = False
    only: Annotated[
        bool,
        Meta(
            description="Requests come through Envoy only: the HTTP port answers probes and operators, so it needs no "
            "`tenants` off loopback."
        ),
    ] = False
    host: Annotated[str, Meta(min_length=1, description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535, description="Port; 0 takes a free one.")] = 9002
    tls_cert_file: Annotated[
        str, Meta(description="File with the port's certificate chain (PEM); empty: no TLS.")
    ] = ""
    tls_key_file: Annotated[str, Meta(description="File with the certificate's key (PEM).")] = ""
    tls_ca_file: Annotated[
        str,
        Meta(
            description="File with the certificates (PEM) of who signs Envoy's; without a certificate of theirs nobody "
            "may ask. Empty: everybody who reaches the port may."
        ),
    ] = ""


class TokenizerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tokenizer of one model."""

    model: Annotated[
        str,
        Meta(min_length=1, max_length=1_024, description="The model's name, as its engines serve it."),
    ]
    path: Annotated[
        str,
        Meta(
            min_length=1,
            description="Folder with the model's `tokenizer.json`, and for chats its `tokenizer_config.json` or "
            "`chat_template.jinja`.",
        ),
    ]


class TokenSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the policy `ttft` gets the token ids of prompts that are text."""

    tokenizers: Annotated[
        list[TokenizerSettings],
        Meta(
            max_length=64,
            description="Tokenizers of models. Each is compared with each engine of its model (/tokenize), and used "
            "for what they agree on.",
        ),
    ] = []
    render: Annotated[
        bool,
        Meta(
            description="Ask an engine for the ids (/v1/.../render, vLLM's `--enable-scale-out`) where no tokenizer "
            "tells them."
        ),
    ] = False
    pass_ids: Annotated[
        bool,
        Meta(
            description="Pass the ids of chats (`kv_transfer_params.prompt_token_ids`) and text completions (`prompt`) "
            "on to engines that take them, which then need not tokenise again; also ids that an engine rendered. Each "
            "engine is asked for one token first, to see whether it does."
        ),
    ] = False
    deadline_ms: Annotated[
        float,
        Meta(
            extra=LIMIT,
            gt=0,
            le=10_000,
            description="Longest time for which a request waits for its ids, in milliseconds; then it goes on without.",
        ),
    ] = 20.0


OtherGateway = Annotated[
    str,
    Meta(
        pattern=r"^(dns\+)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[1-9][0-9]{0,4}$",
        extra={"demand": "must be HOST:PORT or dns+NAME:PORT"},
    ),
]


class SharingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What gateways before the same engines tell each other."""

    gateways: Annotated[
        list[OtherGateway],
        Meta(
            max_length=64,
            description="Ports of the other gateways before the same engines, as `HOST:PORT`; `dns+NAME:PORT` "
            "stands for all addresses of NAME, which is resolved again every 5 s. This gateway's own may be among "
            "them. All must have the same `engines` with the same names.",
        ),
    ] = []
    host: Annotated[
        str, Meta(min_length=1, description="Address on which the other gateways are listened to.")
    ] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65_535, description="Port for it; 0: gateways tell each other nothing.")
    ] = 0
    curve_file: Annotated[
        str,
        Meta(
            description="File with the line `secret KEY`, the same for all gateways, readable by its owner only. "
            "Empty: the key that this user's processes on this host share."
        ),
    ] = ""


PolicyName = Literal["ttft", "least_loaded", "round_robin", "session"]


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `lmcache-gateway`."""

    http: GatewayHttpSettings = GatewayHttpSettings()
    engines: Annotated[
        list[EngineSettings], Meta(max_length=4_096, description="Engines that requests are sent to.")
    ] = []
    engines_from: EnginesFrom = EnginesFrom()
    policy: Annotated[
        PolicyName,
        Meta(
            description="How an engine is chosen: `least_loaded` takes one with the fewest requests under way, "
            "`round_robin` one after the other, `session` the same one for all requests of a session while it serves, "
            "`ttft` the one whose first token is expected soonest, by its queue, its measured rate and what it was "
            "sent before."
        ),
    ] = "least_loaded"
    slo: Annotated[list[SloSettings], Meta(max_length=16, description="Classes of service.")] = []
    tenants: Annotated[
        list[GatewayTenantSettings],
        Meta(
            max_length=1_024,
            description="Tenants; empty: clients need no key, and their `Authorization` goes to the engine.",
        ),
    ] = []
    queue: QueueSettings = QueueSettings()
    tokens: TokenSettings = TokenSettings()
    timeouts: TimeoutSettings = TimeoutSettings()
    retries: RetrySettings = RetrySettings()
    health: HealthSettings = HealthSettings()
    picker: PickerSettings = PickerSettings()
    sharing: SharingSettings = SharingSettings()
    controllers: GatewayControllersSettings = GatewayControllersSettings()
    max_in_flight: Annotated[
        int,
        Meta(ge=1, le=1_000_000, description="Requests under way at a time; more get 503 with Retry-After."),
    ] = 16_384
    drain_s: Annotated[
        float,
        Meta(
            extra=LIMIT,
            ge=0,
            le=3_600,
            description="Time for requests under way when the gateway is stopped, in seconds.",
        ),
    ] = 30.0
    insecure: Annotated[
        bool,
        Meta(
            description="Serve clients without keys, and any Envoy, on addresses that other machines reach."
        ),
    ] = False
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
