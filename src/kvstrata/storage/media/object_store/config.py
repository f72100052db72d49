"""From the fields of an `object_store` entry to settings. What is not ours goes to obstore as it is.

No error and no log line shows a value that may be a secret.
"""

from __future__ import annotations

import datetime
import importlib.util
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvstrata.config.lmcache_names import nearest
from kvstrata.errors import ConfigError

if TYPE_CHECKING:
    from kvstrata.storage.fields import Fields
    from kvstrata.storage.media.object_store.adapter import ObjectStoreSettings

log = logging.getLogger(__name__)

MB = 1 << 20
SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "file")
OURS = (
    "url", "num_workers", "per_op_workers", "multipart_mb", "part_mb", "max_retries", "retry_timeout_ms",
)  # fmt: skip
KNOWN_TO_THE_LIBRARY = (
    "region", "endpoint", "access_key_id", "secret_access_key", "session_token", "skip_signature",
    "virtual_hosted_style_request", "allow_http", "timeout", "connect_timeout", "service_account",
    "account_name", "account_key", "sas_key", "proxy_url", "conditional_put", "s3_express",
)  # fmt: skip
"""The best known of its options, to name the nearest; which ones there are, it says itself."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 1.0


def settings_from(fields: Fields, common: Sequence[str]) -> ObjectStoreSettings:
    """Checked settings; nothing is connected. `common`: fields of every type. Raises ConfigError."""
    if importlib.util.find_spec("obstore") is None:
        fields.refuse("type", "the package obstore is missing; pip install 'kvstrata[object_store]'")
    from kvstrata.storage.media.object_store.adapter import DEFAULT_WORKERS, ObjectStoreSettings

    options = _peer_names(fields)
    url = _url(fields)
    config, client = _sorted(fields, url, options, common)
    endpoint = config.get("endpoint") or config.get("aws_endpoint") or ""
    if str(endpoint).startswith("http://") and "allow_http" not in client:
        raise _wrong(fields, "endpoint", 'must begin with https://, or write "allow_http": true beside it')
    for name, value in (("timeout", "10s"), ("connect_timeout", "2s")):
        if url.startswith("file:"):
            break
        client.setdefault(name, value)
    retry = {
        "max_retries": int(fields.number("max_retries", 3, least=0, most=20, whole=True) or 0),
        "retry_timeout": datetime.timedelta(
            milliseconds=fields.number("retry_timeout_ms", 5_000, least=0, most=300_000, whole=True) or 0
        ),
        "backoff": {
            "init_backoff": datetime.timedelta(seconds=FIRST_PAUSE_S),
            "max_backoff": datetime.timedelta(seconds=MAX_PAUSE_S),
            "base": 2,
        },
    }
    workers = fields.workers("per_op_workers")
    told = fields.get("num_workers") is not None or bool(workers)
    settings = ObjectStoreSettings(
        url=url,
        connect=lambda: _connect(url, config, client, retry),
        multipart_bytes=int((fields.number("multipart_mb", 64, least=5, most=5 << 10) or 0) * MB),
        part_bytes=int((fields.number("part_mb", 8, least=5, most=5 << 10) or 0) * MB),
        num_workers=int(fields.number("num_workers", 4, least=1, most=256, whole=True) or 4),
        per_op_workers=workers if told else dict(DEFAULT_WORKERS),
    )
    if not url.startswith("file:"):  # that would make the directory
        from obstore.exceptions import BaseError

        from kvstrata.storage.media.object_store.adapter import plain

        try:
            settings.connect()
        except (BaseError, TypeError, ValueError) as error:
            where = fields.path
            raise ConfigError(
                f"{where}: obstore refuses these options: {plain(error)}", field=where
            ) from None
    return settings


def _connect(url: str, config: dict[str, Any], client: dict[str, Any], retry: dict[str, Any]) -> Any:
    from obstore.store import from_url

    if url.startswith("file:"):
        return from_url(url, mkdir=True)
    return from_url(url, config=config, client_options=client, retry_config=retry)


def _url(fields: Fields) -> str:
    url = fields.text("url")
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise _wrong(fields, "url", "must not hold credentials or options; write them as fields")
    if parts.scheme not in SCHEMES:
        hint = nearest(parts.scheme, SCHEMES, cutoff=0.5)
        raise fields.wrong("url", f"must begin with one of {', '.join(s + '://' for s in SCHEMES)}{hint}")
    if parts.scheme == "file":
        if parts.netloc or not os.path.isabs(parts.path) or parts.path == "/":
            raise fields.wrong("url", "must be file:// and an absolute path of a directory")
    elif not parts.netloc:
        raise fields.wrong("url", "must name a bucket, as in s3://BUCKET/PREFIX")
    return url.rstrip("/")


def _peer_names(fields: Fields) -> dict[str, Any]:
    """The fields that are not ours, with LMCache's names for its `s3` replaced."""
    if fields.get("s3_endpoint") is not None:
        fields.refuse(
            "s3_endpoint",
            'write "url": "s3://BUCKET/PREFIX" and, for a server that is not Amazon\'s, "endpoint": "https://HOST"',
        )
    if fields.get("max_capacity_gb"):
        fields.refuse("max_capacity_gb", "object stores have no cap here; give the bucket a lifecycle rule")
    fields.noted("max_capacity_gb", "object stores have no cap here")
    fields.noted("s3_num_io_threads", "per_op_workers bounds the requests")
    fields.noted("s3_prefer_http2", "write http1_only or http2_only for the library")
    peers = ("s3_endpoint", "max_capacity_gb", "s3_num_io_threads", "s3_prefer_http2")
    rest = {name: value for name, value in fields.rest().items() if name not in (*OURS, *peers)}
    for old, new in (
        ("s3_region", "region"),
        ("s3_enable_s3express", "s3_express"),
        ("disable_tls", "allow_http"),
    ):
        if old in rest:
            log.info("%s.%s: replaced by %s, which has its value now", fields.path, old, new)
            if new in rest:
                raise _wrong(fields, new, f"is given as {old} too; give one of them")
            rest[new] = rest.pop(old)
    return rest


def _sorted(
    fields: Fields, url: str, options: dict[str, Any], common: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the store and of its HTTP client. The library itself is asked whether it knows one."""
    from obstore.exceptions import BaseError, UnknownConfigurationKeyError
    from obstore.store import HTTPStore, from_url

    config: dict[str, Any] = {}
    client: dict[str, Any] = {}
    for name, value in options.items():
        if not isinstance(value, str | int | float):
            raise _wrong(fields, name, "must be a string, a number, true or false, as all options of obstore")
        value = value if isinstance(value, str | bool) else str(value)
        if url.startswith("file:"):
            raise _unknown(fields, name, common)
        try:
            HTTPStore.from_url("http://localhost", client_options={name: value})
        except ValueError:  # no option of the client
            try:
                from_url(url, config={name: value})
            except UnknownConfigurationKeyError:
                raise _unknown(fields, name, common) from None
            except (BaseError, TypeError, ValueError):  # known, but alone it makes no store
                pass
            config[name] = value
        except (BaseError, TypeError) as error:
            raise _wrong(fields, name, str(error).partition("\n")[0]) from None
        else:
            client[name] = value
    return config, client


def _unknown(fields: Fields, name: str, common: Sequence[str]) -> ConfigError:
    where = f"{fields.path}.{name}"
    hint = nearest(name, (*OURS, *common, *KNOWN_TO_THE_LIBRARY))
    return ConfigError(f"{where}: unknown field, and no option of obstore for this url{hint}", field=where)


def _wrong(fields: Fields, name: str, must: str) -> ConfigError:
    """As Fields.wrong, without the value: it may be a secret."""
    where = f"{fields.path}.{name}"
    return ConfigError(f"{where}: {must}", field=where)
