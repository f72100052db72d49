"""Settings of the gateway."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvstrata.config.common_model import HTTP_HOST, NAME, ListenSettings, LogFormat, LogLevel, Place, says

# fmt: off


class GatewayHttpSettings(ListenSettings, frozen=True, kw_only=True):
    """Settings of the HTTP port to which clients send their requests."""

    host: Annotated[str, says(HTTP_HOST, min_length=1)] = "127.0.0.1"
    port: Annotated[int, says("Port; 0 takes a free one.", ge=0, le=65_535)] = 8090
    token_file: Annotated[str, says(
        "File with the bearer token of operators for /metrics and /gateway/…, readable by its owner only. Empty: a "
        "token is created at each start; the log names its file.")] = ""


class SloSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A class of service: the latency limits of its requests. 0: no limit."""

    name: Annotated[str, says("Name of the class.", pattern=r"^[A-Za-z0-9._-]{1,64}$", demand=NAME)]
    ttft_ms: Annotated[float, says("Longest time to the first token, in milliseconds.", ge=0, le=86_400_000)] = 0.0
    tpot_ms: Annotated[float, says(
        "Longest mean time per token after the first, in milliseconds.", ge=0, le=86_400_000)] = 0.0
    e2e_ms: Annotated[float, says("Longest time to the end of the answer, in milliseconds.", ge=0, le=86_400_000)] = 0.0
    shed: Annotated[bool, says(
        "Refuse a request with 429 and Retry-After when, by the measured rates and the queues, no engine can give its "
        "first token within `ttft_ms`. Needs the policy `ttft`. An engine without requests refuses none.")] = False


class GatewayTenantSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant, identified by its API key."""

    name: Annotated[str, says("Name of the tenant.", pattern=r"^[A-Za-z0-9._-]{1,64}$", demand=NAME)]
    key_file: Annotated[str, says(
        "File with the API key that clients send as `Authorization: Bearer KEY`, readable by its owner only.",
        min_length=1)]
    requests_per_s: Annotated[float, says(
        "Maximum average number of requests a second; further ones get 429. 0: no limit.", ge=0, le=1_000_000)] = 0.0
    burst: Annotated[int, says(
        "Requests that may arrive at once before `requests_per_s` applies.", ge=1, le=1_000_000)] = 10
    max_in_flight: Annotated[int, says(
        "Maximum number of requests under way; further ones get 429. 0: no limit.", ge=0, le=1_000_000)] = 0
    tokens_per_s: Annotated[float, says(
        "Maximum average number of tokens a second, prompts and answers together; further requests get 429. 0: no "
        "limit.", ge=0, le=1e9)] = 0.0
    tokens_burst: Annotated[int, says(
        "Tokens that may be used at once before `tokens_per_s` applies. A larger request is let in when all earlier "
        "use has drained.", ge=1, le=1_000_000_000)] = 100_000
    kv_tenant: Annotated[str, says(
        "Name that keeps this tenant's KV apart from others' in the engines and their caches (`kvstrata.tenant` and "
        "`cache_salt` of its requests); empty: the tenant shares the engines' KV.", max_length=256,
        pattern=r"^[A-Za-z0-9._-]*$", demand=NAME)] = ""
    slo: Annotated[str, says("Class of service of requests without the header `X-SLO-Class`; empty: none.")] = ""
    weight: Annotated[float, says(
        "Share of the engines' work while requests wait (`queue`): a tenant with twice the weight gets twice the "
        "tokens.", gt=0, le=1_000)] = 1.0
    max_priority: Annotated[int, says(
        "Highest priority that a request may set by the header `X-Priority`; higher values count as this one. Each "
        "step moves the request 1 s ahead among its tenant's waiting requests.", ge=0, le=1_000)] = 0


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The gateway's queue: requests wait in it while every engine that could serve them has enough work."""

    ahead_s: Annotated[float, says(
        "Work sent to an engine in advance, in seconds of prompt computation, at least two prompts. A larger value "
        "reduces the effect of the queue's order.", ge=0, le=60)] = 0.2
    max_requests: Annotated[int, says(
        "Maximum number of waiting requests; further ones get 429. 0: no request waits. Needs the policy `auto` or "
        "`ttft`, and is refused with the picker.", ge=0, le=65_536)] = 0


class TimeoutSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits on the time in which a request makes no progress."""

    silence_s: Annotated[float, says(
        "Maximum time without a byte from a client or its engine, in seconds: until the first token, between two "
        "parts of an answer, and while a request arrives.", limit=True, gt=0, le=86_400)] = 600.0


class HealthSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Probes of engines."""

    probe_s: Annotated[float, says(
        "Time between two probes of an engine (/health, /v1/models), in seconds.", ge=0.05, le=3_600)] = 5.0
    timeout_s: Annotated[float, says(
        "Maximum time for the answer to a probe, in seconds.", limit=True, gt=0, le=3_600)] = 3.0


class PickerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The gRPC port (`ext_proc`) on which an Envoy that you operate asks which engine gets a request."""

    listen: Annotated[Place, says(
        "HOST:PORT of the port, such as 127.0.0.1:9002; port 0 takes a free one. Empty: no port. Needs the extra "
        "`picker`.")] = ""
    only: Annotated[bool, says(
        "Requests come only through your own Envoy: the gateway starts none, and its HTTP port answers only probes "
        "and operators, so it needs no `tenants` beyond loopback.")] = False
    tls_cert_file: Annotated[str, says("File with the port's certificate chain (PEM); empty: no TLS.")] = ""
    tls_key_file: Annotated[str, says("File with the certificate's key (PEM).")] = ""
    tls_ca_file: Annotated[str, says(
        "File with the CA certificates (PEM) that must have signed Envoy's certificate; other clients are refused. "
        "Empty: anyone who can reach the port may use it.")] = ""


class TokenizerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tokenizer of one model."""

    model: Annotated[str, says("The model's name, as its engines serve it.", min_length=1, max_length=1_024)]
    path: Annotated[str, says(
        "Folder with the model's `tokenizer.json`, and for chats its `tokenizer_config.json` or `chat_template.jinja`.",
        min_length=1)]


class TokenSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sources of text prompts' token ids, for the policies `auto` and `ttft`."""

    tokenizers: Annotated[list[TokenizerSettings], says(
        "Tokenizers of models. Each is compared with the engines of its model (/tokenize), and used only for "
        "features on which both agree.", max_length=64)] = []
    render: Annotated[bool, says(
        "Ask an engine for the ids (/v1/.../render, vLLM's `--enable-scale-out`) if no tokenizer has them.")] = False
    pass_ids: Annotated[bool, says(
        "Pass the ids of chats (`kv_transfer_params.prompt_token_ids`), also ids that an engine rendered, to engines "
        "that accept them, so that they need not tokenize again. A request for one token first tests whether an "
        "engine accepts ids.")] = False
    deadline_ms: Annotated[float, says(
        "Maximum time that a request waits for its ids, in milliseconds; then it continues without them.",
        limit=True, gt=0, le=10_000)] = 20.0


OtherGateway = Annotated[
    str,
    Meta(
        pattern=r"^(dns\+)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[1-9][0-9]{0,4}$",
        extra={"demand": "must be HOST:PORT or dns+NAME:PORT"},
    ),
]


class SharingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exchange of events between gateways in front of the same engines."""

    gateways: Annotated[list[OtherGateway], says(
        "Ports of the other gateways in front of the same engines, as `HOST:PORT`; `dns+NAME:PORT` stands for all "
        "addresses of NAME, resolved again every 5 s. The list may include this gateway's own port. All gateways "
        "must have the same `engines` with the same names.", max_length=64)] = []
    listen: Annotated[Place, says(
        "HOST:PORT on which this gateway listens for the others; empty: gateways share nothing.")] = ""
    curve_file: Annotated[str, says(
        "File with the line `secret KEY`, the same for all gateways, readable by its owner only. Empty: the key shared "
        "by this user's processes on this host.")] = ""


ControllerUrl = Annotated[
    str,
    Meta(
        max_length=256,
        pattern=r"^tcp://[^\s/,@]+:[0-9]{1,5}$",
        extra={"demand": "must be tcp://HOST:PORT with a controller's reply port"},
    ),
]


class GatewayControllersSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cluster's controllers, which list its instances; the gateway itself follows what each instance holds."""

    urls: Annotated[list[ControllerUrl], says(
        "Ports of all controllers of the cluster, as `tcp://HOST:8400`. The gateway gets the list of instances from "
        "them (`policy: auto` or `ttft`).", max_length=8)] = []
    curve_file: Annotated[str, says(
        "File with this gateway's CURVE keys, written by `kvstrata cluster add --gateway NAME`. Empty: the key shared "
        "by this user's processes on this host.")] = ""
    insecure: Annotated[bool, says("The controllers were started with `--insecure` and have no keys.")] = False
    name: Annotated[str, says(
        "Name of this gateway at the controllers; empty: HOSTNAME-PORT.",
        pattern=r"^[A-Za-z0-9._-]{0,64}$", demand=NAME)] = ""
    tenant: Annotated[str, says(
        "Tenant whose chunks are looked up; the connectors' setting `tenant`.", max_length=256)] = ""


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine, or all engines behind one DNS name."""

    url: Annotated[str, says(
        "The engine's URL. `dns+http://NAME:PORT` stands for an engine at each address of NAME, which is resolved "
        "again every `health.probe_s`: a headless service of Kubernetes, for example. `unix:/PATH` is the socket of an "
        "engine on this host (vLLM's `--uds`).",
        pattern=r"^((dns\+)?https?://[^\s/?#@]+/?|unix:/[!-+\--~]{1,106})$",
        demand="must be http://HOST:PORT, https://HOST:PORT, dns+http://NAME:PORT or unix:/PATH (ASCII, 107 at most)")]
    name: Annotated[str, says(
        "Name in logs and metrics; empty: host and port.",
        pattern=r"^[A-Za-z0-9._:\[\]-]{0,128}$", demand="must be at most 128 letters, digits and . _ : - []")] = ""
    api_key_file: Annotated[str, says(
        "File with the engine's `--api-key`, readable by its owner only; empty: it has none.")] = ""
    kv_events: Annotated[str, says(
        "Where the engine publishes its KV events, for the policies `auto` and `ttft`: tcp://HOST:PORT; empty: the "
        "engine is asked (/kv_event_sources); `off`: nowhere.",
        pattern=r"^(|off|tcp://[^\s/?#@*]+:[0-9]{1,5})$", demand="must be empty, `off` or tcp://HOST:PORT")] = ""
    kv_events_replay: Annotated[str, says(
        "Where the engine sends events again (its `replay_endpoint`), beside `kv_events`; empty: nowhere, and events "
        "that are lost stay lost.",
        pattern=r"^(|tcp://[^\s/?#@*]+:[0-9]{1,5})$", demand="must be empty or tcp://HOST:PORT")] = ""
    data_parallel_size: Annotated[int, says(
        "Data-parallel ranks behind the engine's port, each of which the gateway chooses by itself; 0: as many as "
        "publish KV events, as the engine says when it is asked; 1: the engine is not divided. With `kv_events`, rank "
        "N publishes N ports above.", ge=0, le=1_024)] = 0
    instance: Annotated[str, says(
        "The instance (`lmcache-server`) that the engine is attached to, for `controllers`; empty: the one that names "
        "this engine's URL, as the connector's setting `engine_url` tells it.",
        pattern=r"^[A-Za-z0-9._-]{0,64}$",
        demand="must be the id of an instance: at most 64 letters, digits and . _ -")] = ""
    role: Annotated[Literal["both", "prefill", "decode"], says(
        "What the engine does where requests are split (`split`): `prefill` computes prompts for others, and answers "
        "only if no other engine can; `decode` answers, and computes no prompts for others.")] = "both"
    bootstrap: Annotated[Place, says(
        "HOST:PORT where the engine's MooncakeConnector reports its id (`VLLM_MOONCAKE_BOOTSTRAP_PORT`), for `split: "
        "mooncake`; the engines that answer must reach it too. Empty: port 8998 of the engine's host.")] = ""
    user: Annotated[str, says(
        "User, by name or number, that runs an engine on a loopback address or a unix socket, if it is neither root "
        "nor the gateway's own user. A process of any other user there gets no requests.",
        pattern=r"^([A-Za-z0-9_][A-Za-z0-9._-]{0,63})?$", demand="must be a user's name or number")] = ""


DNS_LABEL = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"


class KubernetesSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engines behind a service of Kubernetes: one for each endpoint that is ready."""

    service: Annotated[str, says(
        "The service; its EndpointSlices are listed every `health.probe_s`.",
        pattern=DNS_LABEL, demand="must be the name of a service")]
    port_name: Annotated[str, says("Name of the endpoints' port; empty: the first.", max_length=63)] = ""
    api_key_file: Annotated[str, says(
        "File with the engines' `--api-key`, readable by its owner only; empty: they have none.")] = ""
    account_dir: Annotated[str, says(
        "Folder of the pod's service account: `token`, `ca.crt`, `namespace`. The account must have the right to "
        "list `endpointslices`.", min_length=1)] = "/var/run/secrets/kubernetes.io/serviceaccount"


class EnginesFrom(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sources of engines besides `engines`."""

    kubernetes: Annotated[KubernetesSettings | None, says(
        "A Kubernetes service whose endpoints are engines; empty: none.")] = None


Contract = Literal["", "kvstrata", "nixl", "mooncake"]
PolicyName = Literal["auto", "ttft", "least_loaded", "round_robin", "session"]


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `lmcache-gateway`."""

    http: GatewayHttpSettings = GatewayHttpSettings()
    engines: Annotated[list[EngineSettings], says("Engines that requests are sent to.", max_length=4_096)] = []
    engines_from: EnginesFrom = EnginesFrom()
    policy: Annotated[PolicyName, says(
        "How an engine is chosen. `auto`: where the request costs all requests the least time until their last "
        "tokens, by queues, measured rates and each engine's cached prefixes; `ttft`: where the first token is "
        "expected soonest, by the same figures; `least_loaded`: an engine with the fewest requests under way; "
        "`round_robin`: each engine in turn; `session`: the same engine for all requests of a session while it "
        "serves.")] = "auto"
    split: Annotated[Contract, says(
        "How one engine may compute a prompt that another one answers, if that costs all requests less time: "
        "`kvstrata`: between engines of one `lmcache-server` or, with `controllers`, of two that read from each "
        "other; `nixl` and `mooncake`: through vLLM's NixlConnector and MooncakeConnector; empty: never. Needs the "
        "policy `auto` or `ttft`.")] = ""
    slo: Annotated[list[SloSettings], says("Classes of service.", max_length=16)] = []
    tenants: Annotated[list[GatewayTenantSettings], says(
        "Tenants; empty: clients need no key, and the engine gets their `Authorization`.", max_length=1_024)] = []
    queue: QueueSettings = QueueSettings()
    tokens: TokenSettings = TokenSettings()
    timeouts: TimeoutSettings = TimeoutSettings()
    health: HealthSettings = HealthSettings()
    picker: PickerSettings = PickerSettings()
    sharing: SharingSettings = SharingSettings()
    controllers: GatewayControllersSettings = GatewayControllersSettings()
    envoy: Annotated[str, says(
        "Path of the Envoy program, version 1.38 or newer, that forwards the requests; empty: that of the extra "
        "`gateway`, or `envoy` on PATH.")] = ""
    max_in_flight: Annotated[int, says(
        "Maximum number of requests under way; further ones get 503 with Retry-After.", ge=1, le=1_000_000)] = 16_384
    drain_s: Annotated[float, says(
        "Time that requests under way get when the gateway stops, in seconds.", limit=True, ge=0, le=3_600)] = 30.0
    insecure: Annotated[bool, says(
        "Serve clients without keys, and any Envoy, on addresses that other machines can reach.")] = False
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"

    @property
    def predicts(self) -> bool:
        """Whether the policy predicts times from the engines' cached prefixes and measured rates."""
        return self.policy in ("auto", "ttft")
