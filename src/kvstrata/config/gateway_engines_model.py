"""Settings of the engines before which a gateway stands, named or found."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


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
    data_parallel_size: Annotated[
        int,
        Meta(
            ge=0,
            le=1_024,
            description="Data-parallel ranks behind the engine's port, each of which the gateway chooses by itself; 0: "
            "as many as publish KV events, as the engine says when it is asked; 1: the engine is not divided. With "
            "`kv_events`, rank N publishes N ports above.",
        ),
    ] = 0
    instance: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9._-]{0,64}$",
            extra={"demand": "must be the id of an instance: at most 64 letters, digits and . _ -"},
            description="The instance (`lmcache-server`) that the engine is attached to, for `controllers`; empty: the "
            "one that names this engine's URL, as the connector's setting `engine_url` tells it.",
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
            description="The service; its EndpointSlices are listed every `health.probe_s`.",
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
    port_name: Annotated[
        str, Meta(max_length=63, description="Name of the endpoints' port; empty: the first.")
    ] = ""
    api_key_file: Annotated[
        str,
        Meta(
            description="File with the engines' `--api-key`, readable by its owner only; empty: they have none."
        ),
    ] = ""
    account_dir: Annotated[
        str,
        Meta(
            min_length=1,
            description="Folder of the pod's service account: `token`, `ca.crt`, `namespace`. The account must be "
            "allowed to list `endpointslices`.",
        ),
    ] = "/var/run/secrets/kubernetes.io/serviceaccount"


class EnginesFrom(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where engines come from beside `engines`."""

    kubernetes: Annotated[
        KubernetesSettings | None, Meta(description="A service of Kubernetes; without it none is asked for.")
    ] = None
