"""Settings of the gateway."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvstrata.config.common_model import HTTP_HOST, NAME, ListenSettings
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
        Meta(gt=0, le=3_600, description="Time in which a request must have arrived whole, in seconds."),
    ] = 60.0
    stalled_s: Annotated[
        float,
        Meta(
            gt=0,
            le=3_600,
            description="A client that reads nothing of its answer for so long is cut, in seconds.",
        ),
    ] = 60.0


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine, or all engines behind one DNS name."""

    url: Annotated[
        str,
        Meta(
            pattern=r"^(dns\+)?https?://[^\s/?#@]+/?$",
            extra={
                "demand": "must be http://HOST:PORT, https://HOST:PORT or dns+http://NAME:PORT, without a path"
            },
            description="The engine's URL. `dns+http://NAME:PORT` stands for an engine at each address of NAME, which "
            "is resolved again every `health.probe_s`: a headless service of Kubernetes, for example.",
        ),
    ]
    name: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9._:\[\]-]{0,128}$",
            extra={"demand": "must be at most 128 letters, digits and . _ : - [ ]"},
            description="Name in logs and metrics; empty: host and port.",
        ),
    ] = ""
    api_key_file: Annotated[
        str,
        Meta(
            description="File with the engine's `--api-key`, readable by its owner only; empty: it has none."
        ),
    ] = ""
    kv_events: Annotated[
        str,
        Meta(
            pattern=r"^(|off|tcp://[^\s/?#@*]+:[0-9]{1,5})$",
            extra={"demand": "must be empty, `off` or tcp://HOST:PORT"},
            description="Where the engine publishes its KV events, for the policy `ttft`: tcp://HOST:PORT; empty: the "
            "engine is asked (/kv_event_sources); `off`: nowhere.",
        ),
    ] = ""
    kv_events_replay: Annotated[
        str,
        Meta(
            pattern=r"^(|tcp://[^\s/?#@*]+:[0-9]{1,5})$",
            extra={"demand": "must be empty or tcp://HOST:PORT"},
            description="Where the engine sends events again (its `replay_endpoint`), beside `kv_events`; empty: "
            "nowhere, and events that are lost stay lost.",
        ),
    ] = ""


DNS_LABEL = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"


class KubernetesSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engines behind a service of Kubernetes: one for each endpoint that is ready."""

    service: Annotated[
        str,
        Meta(
            pattern=DNS_LABEL,
            extra={"demand": "must be the name of a service"},
            description="The service; its EndpointSlices are watched.",
        ),
    ]
    namespace: Annotated[
        str,
        Meta(
            pattern=r"^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)?$",
            extra={"demand": "must be empty or the name of a namespace"},
            description="Its namespace; empty: the pod's own.",
        ),
    ] = ""
    port: Annotated[
        int, Meta(ge=0, le=65_535, description="Port of the endpoints; 0: the first, or that of `port_name`.")
    ] = 0
    port_name: Annotated[
        str, Meta(max_length=63, description="Name of that port; empty: that of `port`.")
    ] = ""
    https: Annotated[bool, Meta(description="Whether the engines speak HTTPS.")] = False
    api_key_file: Annotated[
        str,
        Meta(
            description="File with the engines' `--api-key`, readable by its owner only; empty: they have none."
        ),
    ] = ""
    api_url: Annotated[
        str,
        Meta(
            pattern=r"^(|https://[^\s/?#@]+/?)$",
            extra={"demand": "must be empty or https://HOST:PORT"},
            description="The API server; empty: that of the pod's environment.",
        ),
    ] = ""
    account_dir: Annotated[
        str,
        Meta(
            min_length=1,
            description="Folder of the pod's service account: `token`, `ca.crt`, `namespace`. The account must be "
            "allowed to list and watch `endpointslices`.",
        ),
    ] = "/var/run/secrets/kubernetes.io/serviceaccount"


class EnginesFrom(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where engines come from beside `engines`."""

    kubernetes: Annotated[
        KubernetesSettings | None, Meta(description="A service of Kubernetes; without it none is watched.")
    ] = None


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
    slo: Annotated[
        str, Meta(description="Class of service of requests that name none in `slo_header`; empty: none.")
    ] = ""


class TimeoutSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long the gateway waits for an engine."""

    connect_s: Annotated[
        float, Meta(gt=0, le=3_600, description="For a connection, in seconds; then another engine is tried.")
    ] = 2.0
    first_byte_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description="From sending a request to the first byte of the answer's body, in seconds.",
        ),
    ] = 600.0
    silence_s: Annotated[
        float, Meta(gt=0, le=86_400, description="Between two parts of an answer's body, in seconds.")
    ] = 120.0


class RetrySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a request is sent to another engine: only before the first byte of its answer was passed on."""

    attempts: Annotated[
        int, Meta(ge=1, le=10, description="Engines that a request is sent to at most, the first included.")
    ] = 3
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
        float, Meta(gt=0, le=3_600, description="Time for a probe's answer, in seconds.")
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
            description="Pass the ids of chats on to engines that take them (`kv_transfer_params.prompt_token_ids`), "
            "which then need not tokenise again. Each engine is asked for one token first, to see whether it does."
        ),
    ] = False
    deadline_ms: Annotated[
        float,
        Meta(
            gt=0,
            le=10_000,
            description="Longest time for which a request waits for its ids, in milliseconds; then it goes on without.",
        ),
    ] = 20.0
    cache_mb: Annotated[
        float,
        Meta(
            ge=0,
            le=65_536,
            description="Memory for the ids of conversations' earlier turns, in MiB; a token takes 4 bytes.",
        ),
    ] = 64.0
    threads: Annotated[int, Meta(ge=1, le=64, description="Threads that tokenise.")] = 2


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
    silent_s: Annotated[
        float,
        Meta(
            ge=1.5,
            le=60,
            description="Time without a word from another gateway after which its requests count as ended, in seconds; "
            "each tells what it has under way every 0.5 s.",
        ),
    ] = 2.0


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
    session_header: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9-]{1,64}$",
            extra={"demand": "must be the name of a header"},
            description="Header that names a request's session for the policy `session`; without the header it is the "
            "body's `prompt_cache_key` or `user`.",
        ),
    ] = "x-session-id"
    slo_header: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9-]{1,64}$",
            extra={"demand": "must be the name of a header"},
            description="Header that names a request's class of service.",
        ),
    ] = "x-slo-class"
    slo: Annotated[list[SloSettings], Meta(max_length=16, description="Classes of service.")] = []
    tenants: Annotated[
        list[GatewayTenantSettings],
        Meta(
            max_length=1_024,
            description="Tenants; empty: clients need no key, and their `Authorization` goes to the engine.",
        ),
    ] = []
    tokens: TokenSettings = TokenSettings()
    timeouts: TimeoutSettings = TimeoutSettings()
    retries: RetrySettings = RetrySettings()
    health: HealthSettings = HealthSettings()
    picker: PickerSettings = PickerSettings()
    sharing: SharingSettings = SharingSettings()
    state_dir: Annotated[
        str,
        Meta(
            description="Folder of this gateway alone, in which it keeps what it has learned (prefixes, rates, engines "
            "of stored responses) every 2 s, so that it knows it after a restart. Empty: it forgets."
        ),
    ] = ""
    max_in_flight: Annotated[
        int,
        Meta(ge=1, le=1_000_000, description="Requests under way at a time; more get 503 with Retry-After."),
    ] = 16_384
    drain_s: Annotated[
        float,
        Meta(
            ge=0, le=3_600, description="Time for requests under way when the gateway is stopped, in seconds."
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
