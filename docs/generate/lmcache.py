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

Generated from the code by `make docs`; to change this page, edit the tables in `src/kvstrata/config/lmcache`. The names
come from LMCache {VERSION}, its program and its documentation, as of {READ_ON}.

1. Leave `LMCACHE_CONFIG_FILE` and the `LMCACHE_…` variables of your engines as they are: our engines read both.
   Settings for memory, disks, stores and other hosts belong to the server here; [the keys
   below](#lmcache_config_file-keys-and-lmcache_key-variables) name the matching server settings
   ([configuration](configuration.md)). `kvstrata doctor` lists the names in its own environment that have no effect,
   and what to set instead.
2. Start `lmcache-server` instead of `lmcache server`, and `lmcache-controller` instead of `lmcache_controller`, with
   the same flags.
3. Start vLLM as before. Without the `lmcache` package, or with `KVSTRATA_TAKEOVER=1`, LMCache's [connector
   names](#connectors) load kvstrata's connectors.

kvstrata does not read KV that LMCache has stored: the cache starts empty, and old files, keys and objects stay until
you delete them.

What happens to a name:

| | |
|---|---|
| kept | same name, same meaning |
| translated | accepted; the log names our setting |
| no effect | accepted; the log says so |
| refused | kvstrata has no such feature. A flag is an error unless its value asks for what kvstrata does anyway; \
an engine's setting is accepted without effect |

An unknown flag is an error, as is an unknown key in our own file. An unknown key in LMCache's file, or an unknown
`LMCACHE_…` variable, causes a warning. `--blend*` stands for all other names that start with `--blend`. Engines
interpret quoted numbers, `1`, `"True"` and empty variables as LMCache does.

Server flags whose meaning depends on their value or on other flags:

- `--l1-size-gb` and `--eviction-policy`, which `lmcache server` requires, without `--l2-adapter`: no L2, as in
  LMCache. If one of the two is missing, the server creates its default disk tier.
- `--eviction-policy noop --l2-store-policy skip_l1`: the policy `VALUE`. Chunks are put to L2 when they are stored,
  and are evicted from L1 when their space is needed.
- `--eviction-policy noop` alone is kept: once L1 is full, every further store is refused.
- `--eviction-policy` with another policy's name: the policy `VALUE` ([what is kept, and why](value.md)). In a file,
  `l1: {{eviction_policy: LRU}}` evicts strictly by last use.
- `--eviction-policy IsolatedLRU`: the policy `VALUE`, with quotas set by `kvstrata ctl quota` or `quotas_gb`. Quotas
  protect a tenant's part of L1 and do not cap it. A tenant without a quota shares L1 with all others.
- `--l2-adapter` of type `nixl_store` with `POSIX` and a `file_path`: becomes type `fs`, in a separate folder below
  that path.
- `replica_num` and `nof_replica_num` of a `mooncake_store` adapter: become options of its `replicate`.

In a request's `kv_transfer_params`, `lmcache.max_offload_tokens`, `lmcache.skip_load` and vLLM's own
`max_load_tokens` are kept. Of the HTTP paths, `/healthcheck` and `/metrics` are kept; the others are
[below](#http-paths).
"""
_COMMANDS = """
## Commands

| LMCache | kvstrata |
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

| LMCache | kvstrata |
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
    """A row for each group of names with the same fate and the same text."""
    groups: dict[tuple[Fate, str], list[str]] = {}
    for name, entry in table.items():
        groups.setdefault((entry.fate, _says(entry)), []).append(name)
    rows = [f"| {_codes(names)} | {fate} | {says} |\n" for (fate, says), names in groups.items()]
    return f"\n## {title}\n\n| name | result | meaning here |\n|---|---|---|\n{''.join(rows)}"


def _says(entry: Name) -> str:
    harmless = f"without effect if {_codes(entry.harmless)}" if entry.harmless else ""
    target = f"`{entry.target}`" if entry.target else ""
    return "; ".join(filter(None, (target, entry.say, harmless)))


def _codes(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
