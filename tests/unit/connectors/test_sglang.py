"""SGLang: where its pages lie, what their identity covers, and what is refused at the start."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from kvstrata.connectors.sglang.identity import layout_identity, pool_slice
from kvstrata.connectors.sglang.page_cache import PageCache
from kvstrata.connectors.sglang.pages import read_pages
from kvstrata.errors import ConfigError
from kvstrata.types import RequestIdentity, identity_root
from tests.harness.sglang_double import Arguments, HostPool, StorageConfig, modules


@pytest.fixture(scope="module")
def storage_class():
    yield from modules(Arguments())


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_a_pages_runs_are_those_of_the_pool_in_the_order_of_addresses(layout, latent):
    pool = HostPool(layout, layers=3, latent=latent)
    runs = read_pages("kv", pool)
    halves = 1 if latent else 2
    assert len(runs.run_bytes) == (3 * halves if layout == "layer_first" else halves)
    assert runs.page_bytes == pool.page_bytes
    assert runs.bases == tuple(sorted(runs.bases))
    last = pool.get_page_buffer_meta(pool.slots(runs.n_pages - 1))
    assert sorted(last[0]) == [
        b + s * (runs.n_pages - 1) for b, s in zip(runs.bases, runs.strides, strict=True)
    ]
    assert runs.plan().payload_bytes(1) == pool.page_bytes


def test_pools_whose_pages_cannot_be_found_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"host pool 'mamba' .*no_addresses.*--hicache-mem-layout"):
        read_pages("mamba", HostPool("no_addresses"))

    class Empty(HostPool):
        def get_page_buffer_meta(self, indices):
            return None

    class Uneven(HostPool):
        def get_page_buffer_meta(self, indices):
            addresses, lengths = super().get_page_buffer_meta(indices)
            return [a + (64 if indices[0] else 0) * indices[0] ** 2 for a in addresses], lengths

    class Moving(HostPool):
        shared_allocation_domain = object()

    with pytest.raises(ConfigError, match="moves its pages about"):
        read_pages("kv", Moving())
    with pytest.raises(ConfigError, match="no bytes of its own"):
        read_pages("kv", Empty())
    with pytest.raises(ConfigError, match="equal distances"):
        read_pages("kv", Uneven())


def root_of(
    arguments: Arguments, config: StorageConfig, pool: HostPool, version: str = "1"
) -> tuple[bytes, bytes]:
    part, facts = pool_slice("kv", pool, read_pages("kv", pool), config, version)
    return identity_root(layout_identity(arguments, facts), RequestIdentity()), part.digest()


def test_whatever_decides_the_meaning_of_a_page_is_in_its_identity():
    for change in (
        {"model_path": "org/other"},
        {"revision": "v2"},
        {"tokenizer_path": "other"},
        {"dtype": "float16"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"quantization": "fp8"},
        {"weight_version": "2"},
        {"load_format": "dummy"},
        {"tp_size": 2},
        {"tp_rank": 1},
        {"pp_size": 2},
        {"attn_cp_size": 2},
        {"is_mla_model": True},
        {"layout": "layer_first"},
        {"heads": 2},
        {"layers": 3},
        {"version": "2"},
    ):

        def made(change):
            rest = dict(change)
            version = rest.pop("version", "1")
            pool = HostPool(**{n: rest.pop(n) for n in ("layout", "heads", "layers") if n in rest})
            of_config = {f.name for f in dataclasses.fields(StorageConfig)}
            config = StorageConfig(**{n: v for n, v in rest.items() if n in of_config})
            return root_of(
                Arguments(**{n: v for n, v in rest.items() if n not in of_config}), config, pool, version
            )

        assert made({}) == made({}), "a restart finds its pages again"
        assert made(change)[0] != made({})[0]


def test_a_local_model_is_its_files_and_not_its_path(tmp_path):
    roots = []
    for folder, weights in (("a/model", b"1"), ("b/model", b"1"), ("c/model", b"2")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "model.safetensors").write_bytes(weights)
        roots.append(root_of(Arguments(model_path=str(tmp_path / folder)), StorageConfig(), HostPool()))
    assert roots[0] == roots[1] != roots[2]


def test_the_files_of_a_hub_model_are_those_in_the_hubs_cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder, roots = tmp_path / "models--org--model", []
    (folder / "refs").mkdir(parents=True)
    for commit in ("a" * 40, "b" * 40):
        files = folder / "snapshots" / commit
        files.mkdir(parents=True)
        (files / "config.json").write_text("{}")
        (files / "model.safetensors").write_bytes(commit.encode())
        (folder / "refs" / "main").write_text(commit)
        arguments = Arguments(weight_version="default")
        roots.append(root_of(arguments, StorageConfig(), HostPool()))
        roots.append(
            root_of(Arguments(speculative_draft_model_path="org/model"), StorageConfig(), HostPool())
        )
    assert len(set(roots)) == 4


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize(
    "wrong", [{}, {"model_path": "s3://bucket/model"}, {"load_format": "remote"}, {"load_format": "dummy"}]
)
def test_weights_that_nothing_names_need_a_version(tmp_path, wrong, draft):
    (tmp_path / "config.json").write_text("{}")
    arguments = {"model_path": str(tmp_path), **wrong}
    if draft:
        arguments["speculative_draft_model_path"] = arguments["model_path"]
        (tmp_path / "model.bin").write_text("1")
    if wrong.get("load_format") != "dummy" and (wrong or not draft):
        with pytest.raises(ConfigError, match=r"weight_version: .*--weight-version"):
            root_of(Arguments(**arguments, weight_version="default"), StorageConfig(), HostPool())
    assert root_of(Arguments(**arguments, weight_version="7"), StorageConfig(), HostPool())


def test_scales_of_a_file_are_in_the_identity_and_an_unreadable_file_stops_the_start(tmp_path):
    path = tmp_path / "scales.json"
    path.write_text("1")
    one = root_of(Arguments(quantization_param_path=str(path)), StorageConfig(), HostPool())
    path.write_text("2")
    assert root_of(Arguments(quantization_param_path=str(path)), StorageConfig(), HostPool()) != one
    with pytest.raises(ConfigError, match="quantization_param_path"):
        root_of(Arguments(quantization_param_path=str(tmp_path / "absent")), StorageConfig(), HostPool())


def test_settings_come_from_the_extra_config_and_wrong_ones_stop_the_start(storage_class):
    extra = {
        "backend_name": "kvstrata",
        "module_path": "kvstrata.connectors.sglang",
        "class_name": "HiCacheKvstrata",
        "interface_v1": 1,
        "kvstrata.lookup_timeout_ms": 7,
    }
    assert storage_class(StorageConfig(extra_config=extra), {})._settings.lookup_timeout_ms == 7
    with pytest.raises(ConfigError, match=r"hicache-storage-backend-extra-config.*lookup_timout_ms"):
        storage_class(StorageConfig(extra_config={"kvstrata.lookup_timout_ms": 7}))
    with pytest.raises(ConfigError, match='lacks "interface_v1": 1'):
        storage_class(StorageConfig(extra_config={"interface_v1": 0}))
    with pytest.raises(ConfigError, match="dcp_size: 2"):
        storage_class(StorageConfig(dcp_size=2))


def test_pages_that_l1_lacks_are_told_as_a_miss_where_there_is_no_l2():
    told = []
    client = SimpleNamespace(
        connected=True,
        has_l2=False,
        identity=lambda request: SimpleNamespace(root=bytes(32), ready=True),
        peek=lambda identity, chain: 2,
        missed=lambda identity, chain, *, request_id: told.append((request_id, len(chain) // 32)),
    )
    pages = PageCache(client, SimpleNamespace(plan=lambda: None), tenant="", wait_s=1.0)
    assert pages.count(["a", "b"]) == 2 and told == []
    assert pages.count(["a", "b", "c", "d", "e"]) == 2
    assert told == [("sglang-1", 3)]
