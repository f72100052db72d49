"""docs/coming-from-lmcache.md from the tables of LMCache's names."""

from __future__ import annotations

from collections.abc import Mapping

from kvstrata.config.lmcache import CONNECTORS, READ_ON, VERSION
from kvstrata.config.lmcache.fates import Fate, Name
from kvstrata.config.lmcache.flags import CONTROLLER_FLAGS, FLAG_PREFIXES, SERVER_FLAGS
from kvstrata.config.lmcache.keys import (
    CLIENT_KEY_PREFIXES,
    CLIENT_KEYS,
    CONNECTOR_EXTRA,
    CONNECTOR_EXTRA_PREFIXES,
    VARIABLE_PREFIXES,
    VARIABLES,
)

_INTRO = f"""# Coming from LMCache

Generated from the code by `make docs`; to change it, change the tables in `src/kvstrata/config/lmcache`. The names are
those of LMCache {VERSION}, its program and its documentation, read on {READ_ON}.

1. Engines read the file in `LMCACHE_CONFIG_FILE` and `LMCACHE_…` variables as they are. What these say about memory,
   disks, stores and other hosts is the server's here; [the keys](#lmcache_config_file-keys-and-lmcache_key-variables)
   are listed below with its settings ([configuration](configuration.md)). `kvstrata doctor` tells which names of its
   own environment have no effect, and what to set instead.
2. Start `lmcache-server` where `lmcache server` was started, and `lmcache-controller` for `lmcache_controller`, with
   the same flags.
3. Start vLLM as before. Without the `lmcache` package, or with `KVSTRATA_TAKEOVER=1`, the names of
   [connectors](#connectors) mean kvstrata's.

KV that LMCache has stored is not read: the cache begins empty, and old files, keys and objects stay until you delete
them.

What happens to a name:

| | |
|---|---|
| kept | same name, same meaning |
| translated | accepted; the log names our setting |
| no effect | accepted; the log says so |
| refused | nothing here does what it asks for. A flag is an error unless its value asks for nothing; a setting of an \
engine is accepted without effect |

An unknown flag is an error, and so is an unknown key of our own file; an unknown key of LMCache's file or an unknown
`LMCACHE_…` variable is a warning. `--blend*` stands for all other names that begin so. To an engine, quoted numbers,
`1`, `"True"` and empty variables mean what they mean to LMCache.

Flags of a server that mean more together, or with a value:

- `--l1-size-gb` and `--eviction-policy`, which `lmcache server` requires, without `--l2-adapter`: no L2, as there.
  Without one of the two, a server makes its embedded disk tier.
- `--eviction-policy noop --l2-store-policy skip_l1`: VALUE. Chunks are put to L2 when they are stored, and leave L1
  when their room is needed.
- `--eviction-policy noop` alone is kept: once L1 is full, every further store is refused.
- `--eviction-policy` with another name of a policy: VALUE ([what is kept, and why](value.md)). In a file, `l1:
  {{eviction_policy: LRU}}` evicts strictly by last use.
- `--eviction-policy IsolatedLRU`: VALUE, with quotas by `kvstrata ctl quota` or `quotas_gb`, which protect a tenant's
  part of L1 and do not cap it. A tenant without a quota shares L1 with all others.
- `--l2-adapter` of type `nixl_store` with `POSIX` and a `file_path`: type `fs`, in a folder of its own below that path.
- `replica_num` and `nof_replica_num` of a `mooncake_store` adapter: options of its `replicate`.

Keys of a request's `kv_transfer_params`: `lmcache.max_offload_tokens` and `lmcache.skip_load` are kept, and
vLLM's own `max_load_tokens`. Of the HTTP paths, `/healthcheck` and `/metrics` are kept; the others are
[below](#http-paths).
"""
_COMMANDS = """
## Commands

| LMCache's | here |
|---|---|
| `lmcache server` | lmcache-server |
| `lmcache_controller` | lmcache-controller |
| `lmcache coordinator` | lmcache-controller, which takes other flags |
| `lmcache ping` | kvstrata ctl ready |
| `lmcache describe` | kvstrata ctl status |
| `lmcache query` | kvstrata ctl explain |
| `lmcache kvcache` | kvstrata ctl clear |
| `lmcache quota` | kvstrata ctl quota |
| `lmcache bench` | kvstrata bench |
| `lmcache memory` | kvstrata ctl status |
| `lmcache trace`, `lmcache tool`, `lmcache mock` | none |
| `lmcache_server` | an L2 adapter such as resp (--l2-adapter), or a cluster |
"""
_HTTP = """
## HTTP paths

| LMCache's | here |
|---|---|
| `/`, `/periodic-threads-health` | `GET /readyz` |
| `/status`, `/meta`, `/backends`, `/hot_cache` | `GET /v1/status` |
| `/conf`, `/config` | `lmcache-server --check` |
| `/clear-cache`, `/cache/clear`; the controller's `/clear` | `POST /v1/clear` |
| `/cache/prefetches` | `POST /v1/prewarm` |
| `/quota` | `PUT /v1/tenants/{tenant}/quota` with `{"quota_gb": GB}` |
| `/config/adapters`, `/reconfigure/{backend}/l2/{operation}` | `GET /v1/l2/adapters`, `POST \
/v1/l2/adapters/{name}/pause` and `…/resume` |
| `/loglevel` | `PUT /v1/log-level` with `{"level": "debug"}` |
| `/lookup/{name}` | `GET /v1/explain/{request_id}` |
| the controller's `/lookup`, `/pin`, `/move` | `POST /v1/lookup`, `/v1/claims`, `/v1/move` |
| the controller's `/query_instance`, `/query_worker_info`, `/health` | `GET /v1/instances`, `/v1/instances/{name}` |
| the controller's `/check_finish` | `wait_s` of the request, or the event `command` of `GET /v1/events` |
| `/cache/objects`, `/cache/checksums`, `/env`, `/run_script`, `/threads`, `/metrics/reset`; the \
controller's `/compress`, `/decompress` | none |
"""


def coming_from_lmcache() -> str:
    """The whole page."""
    parts = [_INTRO]
    for title, table, prefixes in (
        ("`lmcache server` flags", SERVER_FLAGS, FLAG_PREFIXES),
        ("`lmcache_controller` flags", CONTROLLER_FLAGS, {}),
        ("`kv_connector_extra_config`", CONNECTOR_EXTRA, CONNECTOR_EXTRA_PREFIXES),
        ("`LMCACHE_CONFIG_FILE` keys and `LMCACHE_<KEY>` variables", CLIENT_KEYS, CLIENT_KEY_PREFIXES),
        ("Other variables", VARIABLES, VARIABLE_PREFIXES),
    ):
        parts.append(_table(title, {**table, **{f"{name}*": entry for name, entry in prefixes.items()}}))
    parts += [_COMMANDS, _HTTP]
    parts.append("\n## Connectors\n\n| `kv_connector` | `kv_connector_module_path` |\n|---|---|\n")
    parts += [f"| `{name}` | {_codes(modules) or 'none'} |\n" for name, modules in CONNECTORS.items()]
    return "".join(parts)


def _table(title: str, table: Mapping[str, Name]) -> str:
    """A row for each name that is kept or translated; one for all names of which the same is said."""
    groups: dict[tuple[Fate, str], list[str]] = {}
    for name, entry in table.items():
        groups.setdefault((entry.fate, _says(entry)), []).append(name)
    rows = [f"| {_codes(names)} | {fate} | {says} |\n" for (fate, says), names in groups.items()]
    return f"\n## {title}\n\n| name | here | |\n|---|---|---|\n{''.join(rows)}"


def _says(entry: Name) -> str:
    harmless = f"without effect if {_codes(entry.harmless)}" if entry.harmless else ""
    target = f"`{entry.target}`" if entry.target else ""
    return "; ".join(filter(None, (target, entry.say, harmless)))


def _codes(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
