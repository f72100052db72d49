"""The fields of an entry of type `object_store`. Fields that are not ours go to obstore unchanged.

No error and no log line shows a value that may be a secret.
"""

from __future__ import annotations

import datetime
import functools
import importlib.util
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from kvstrata.config.common_model import says
from kvstrata.config.demands import nearest
from kvstrata.config.secrets import scrubbed
from kvstrata.errors import ConfigError, install
from kvstrata.patience import patience
from kvstrata.tiers.config import COMMON, Make, Medium
from kvstrata.tiers.media.shared import PerOpWorkers, medium_name
from kvstrata.tiers.structs import Place

MB = 1 << 20
SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")
KNOWN_TO_THE_LIBRARY = (
    "region", "endpoint", "access_key_id", "secret_access_key", "session_token", "skip_signature",
    "virtual_hosted_style_request", "allow_http", "timeout", "connect_timeout", "service_account",
    "account_name", "account_key", "sas_key", "proxy_url", "conditional_put", "s3_express",
)  # fmt: skip
"""Common options of obstore, which errors suggest for a similar wrong name; obstore itself decides which exist."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 1.0


class ObjectStoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A bucket of S3, Google Cloud Storage or Azure."""

    # fmt: off
    url: Annotated[str, says(
        "`s3://BUCKET/PREFIX`; also `gs`, `az`, `abfs` and `adl`. It must hold no credentials.", min_length=1)]
    options: Annotated[dict[str, Any], says(
        "Every other field is an option of obstore, such as `region`, `endpoint` or a credential.")]
    num_workers: Annotated[Annotated[int, Meta(ge=1, le=256)] | None, says(
        "Threads for the lanes that `per_op_workers` does not name.")] = None
    per_op_workers: PerOpWorkers = {}
    multipart_mb: Annotated[float, says(
        "Records larger than this many MB are uploaded in parts.", ge=5, le=5 << 10)] = 64
    part_mb: Annotated[float, says("MB of each part.", ge=5, le=5 << 10)] = 8
    max_retries: Annotated[int, says("Maximum number of times that obstore retries a failed request.", ge=0, le=20)] = 3
    retry_timeout_ms: Annotated[int, says(
        "Milliseconds after which obstore stops retrying a request.", ge=0, le=300_000)] = 5_000
    s3_endpoint: Annotated[Any, says("Refused; write `url` and `endpoint`.")] = None
    max_capacity_gb: Annotated[Any, says("Refused unless 0; object stores have no cap here.")] = None
    # fmt: on

    def __repr__(self) -> str:
        return f"ObjectStoreConfig({self.url!r}, ...)"  # some of the options are credentials


def _missing() -> str:
    if importlib.util.find_spec("obstore") is None:
        return f"the package obstore is missing: {install('object_store')}"
    return ""


def _prepare(config: ObjectStoreConfig, place: Place, name: str) -> Make:
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    from kvstrata.tiers.media.object_store.adapter import (
        DEFAULT_WORKERS,
        ObjectStoreAdapter,
        ObjectStoreSettings,
    )
    from kvstrata.tiers.media.object_store.failures import plain

    _check_foreign(config, place)
    options = config.options
    url = _url(config.url, place)
    store_options, client = _sorted(place, url, options)
    endpoint = options.get("endpoint") or options.get("aws_endpoint") or ""
    if str(endpoint).startswith("http://") and "allow_http" not in options:
        raise place.hidden("endpoint", 'must begin with https://, or write "allow_http": true beside it')
    client = {"timeout": f"{patience(10):g}s", "connect_timeout": f"{patience(2):g}s", **client}
    retry = {
        "max_retries": config.max_retries,
        "retry_timeout": datetime.timedelta(milliseconds=config.retry_timeout_ms),
        "backoff": {
            "init_backoff": datetime.timedelta(seconds=FIRST_PAUSE_S),
            "max_backoff": datetime.timedelta(seconds=MAX_PAUSE_S),
            "base": 2,
        },
    }
    connect = functools.partial(
        from_url, url, config=store_options, client_options=client, retry_config=retry
    )
    try:
        connect()
    except (BaseError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{place.path}: obstore refuses these options: {plain(error)}", field=place.path
        ) from None
    told = config.num_workers is not None or bool(config.per_op_workers)
    settings = ObjectStoreSettings(
        url=url,
        connect=connect,
        medium=medium_name("object_store", url, hosts=(str(endpoint or "the provider's"),)),
        multipart_bytes=int(config.multipart_mb * MB),
        part_bytes=int(config.part_mb * MB),
        num_workers=config.num_workers or 4,
        per_op_workers=config.per_op_workers if told else dict(DEFAULT_WORKERS),
    )
    return lambda: ObjectStoreAdapter(settings, name=name)


def _url(url: str, place: Place) -> str:
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise place.hidden("url", "must not hold credentials or options; write them as fields")
    if parts.scheme == "file":
        raise place.refused("url", url, 'a directory is an adapter of type "fs", with its path as base_path')
    if parts.scheme not in SCHEMES:
        hint = nearest(parts.scheme, SCHEMES, cutoff=0.5)
        raise place.wrong("url", url, f"must begin with one of {', '.join(s + '://' for s in SCHEMES)}{hint}")
    if not parts.netloc:
        raise place.wrong("url", url, "must name a bucket, as in s3://BUCKET/PREFIX")
    return url.rstrip("/")


def _check_foreign(config: ObjectStoreConfig, place: Place) -> None:
    """Raises ConfigError for fields of LMCache's `s3` that mean something which is written otherwise here."""
    if config.s3_endpoint is not None:
        advice = 'write "url": "s3://BUCKET/PREFIX" and, for a server that is not Amazon\'s, "endpoint": "https://HOST"'
        raise place.refused("s3_endpoint", config.s3_endpoint, advice)
    if config.max_capacity_gb:
        advice = "object stores have no cap here; give the bucket a lifecycle rule"
        raise place.refused("max_capacity_gb", config.max_capacity_gb, advice)


def _sorted(place: Place, url: str, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of the store, and those of its HTTP client. obstore itself is asked whether it knows an option."""
    from obstore.exceptions import BaseError, UnknownConfigurationKeyError
    from obstore.store import HTTPStore, from_url

    config: dict[str, Any] = {}
    client: dict[str, Any] = {}
    for name, value in options.items():
        if not isinstance(value, str | int | float):
            must = "must be a string, a number, true or false, like all options of obstore"
            raise place.hidden(name, must)
        value = value if isinstance(value, str | bool) else str(value)
        try:
            HTTPStore.from_url("http://localhost", client_options={name: value})
        except ValueError:  # not an option of the client
            try:
                from_url(url, config={name: value})
            except UnknownConfigurationKeyError:
                raise _unknown(place, name) from None
            except (BaseError, TypeError, ValueError):  # a known option, but a store needs more than this one
                pass
            config[name] = value
        except (BaseError, TypeError) as error:
            raise place.hidden(name, scrubbed(str(error).partition("\n")[0])) from None
        else:
            client[name] = value
    return config, client


def _unknown(place: Place, name: str) -> ConfigError:
    ours = [field for field in ObjectStoreConfig.__struct_fields__ if field != "options"]
    hint = nearest(name, (*ours, *COMMON, *KNOWN_TO_THE_LIBRARY))
    return place.hidden(name, f"unknown field, and not an option of obstore for this url{hint}")


MEDIUM = Medium(
    ObjectStoreConfig,
    _prepare,
    rest="options",
    refusal=_missing,
)
