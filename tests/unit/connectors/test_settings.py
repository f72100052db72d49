"""The connector's settings: sources, refusals; and its layout identity: which differences between engines change it."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import msgspec
import pytest

from kvstrata.config.client_model import ClientSettings
from kvstrata.connectors import fingerprint as fingerprints
from kvstrata.connectors.fingerprint import fingerprint, has_weights
from kvstrata.connectors.settings import load_settings
from kvstrata.connectors.vllm.identity import engine_group, layout_identity, weights_are_named
from kvstrata.types import RequestIdentity, identity_root


def test_extra_config_wins_over_environment_over_file(tmp_path):
    file = tmp_path / "kv strata.yaml"
    file.write_text("chunk_size: 128\nlookup_timeout_ms: 1\nload_mode: sync\nport: 1000\n")
    settings, notes = load_settings(
        {"lmcache.mp.port": 3000, "kvstrata.tenant": "blue"},
        {
            "LMCACHE_CONFIG_FILE": str(file),
            "LMCACHE_LOOKUP_TIMEOUT_MS": "20",
            "LMCACHE_CHUNK_SIZE": "512",
            "KVSTRATA_CHUNK_SIZE": "1024",
            "KVSTRATA_PORT": "2000",
            "HOME": "/x",
        },
    )
    assert settings == ClientSettings(
        chunk_size=1024, lookup_timeout_ms=20, load_mode="sync", port=3000, tenant="blue"
    )
    assert notes == []


def test_the_file_of_the_server_serves_the_engine_too(tmp_path):
    file = tmp_path / "one.yaml"
    file.write_text("port: 1234\nl1: {size_gb: 2}\nl2_adapters: []\nhttp: {port: 1}\nchunk_size: 64\n")
    settings, notes = load_settings(
        {}, {"KVSTRATA_CONFIG_FILE": str(file), "KVSTRATA_L1_SIZE_GB": "3", "KVSTRATA_HTTP_PORT": "9"}
    )
    assert (settings.port, settings.chunk_size, notes) == (1234, 64, [])


def test_the_server_address_is_understood_in_the_forms_that_users_write():
    for value, port in (("tcp://localhost", 5555), ("tcp://127.0.0.1:7000", 7000)):
        settings, notes = load_settings({"lmcache.mp.host": value}, {})
        assert (settings.port, notes) == (port, [])


# -- identity


def config_of(folder, **changes):
    hf = SimpleNamespace(
        to_dict=lambda: {
            "layers": 2,
            "rope": {"theta": 1e4},
            "transformers_version": "1",
            **changes.pop("hf", {}),
        },
        _commit_hash=changes.pop("commit", None),
    )
    model = {
        "model": str(folder),
        "revision": None,
        "tokenizer": str(folder),
        "dtype": "torch.bfloat16",
        "quantization": None,
        "hf_config": hf,
        "seed": 0,
    } | changes.pop("model_config", {})
    return SimpleNamespace(
        model_config=SimpleNamespace(**model),
        cache_config=SimpleNamespace(**changes.pop("cache_config", {})),
        load_config=SimpleNamespace(load_format=changes.pop("load_format", "auto")),
        speculative_config=changes.pop("speculative_config", None),
        parallel_config=SimpleNamespace(data_parallel_rank=changes.pop("data_parallel_rank", 0)),
        kv_transfer_config=SimpleNamespace(engine_id=changes.pop("engine_id", "e")),
        instance_id=changes.pop("instance_id", "i"),
        **changes,
    )


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "a model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({"x": 1}))
    (made / "model.safetensors").write_bytes(bytes(range(256)) * 20_000)
    return made


def draft_of(place, method="eagle"):
    model = config_of(place).model_config
    return SimpleNamespace(model=str(place), method=method, draft_model_config=model)


def layout(config, **more):
    return layout_identity(config, kv_dtype="bfloat16", chunk_tokens=256, **more)


def rotary(**rope):
    """Two engines with these settings that differ in the length of their longest prompt."""
    return [{"hf": {"rope_parameters": rope}, "model_config": {"max_model_len": n}} for n in (4_096, 131_072)]


SCALES = {"cache_config": {"calculate_kv_scales": True}}
APART = [
    ({}, {"hf": {"rope": {"theta": 1e6}}}),
    ({}, {"model_config": {"dtype": "torch.float16"}}),
    ({}, {"model_config": {"quantization": "fp8"}}),
    ({}, {"commit": "abc"}),
    ({}, {"load_format": "dummy"}),
    ({}, {"speculative_config": draft_of("d")}),
    ({}, SCALES),
    (SCALES, {**SCALES, "instance_id": "j"}),
    rotary(rope_type="longrope"),
    rotary(full_attention={"rope_type": "longrope"}),
]
TOGETHER = [
    rotary(rope_type="yarn"),
    (SCALES, SCALES),
    ({}, {"hf": {"transformers_version": "2"}}),
    ({}, {"speculative_config": SimpleNamespace(model="ngram", method="ngram")}),
    ({}, {"engine_id": "other", "instance_id": "other"}),
]


def test_what_changes_kv_and_nothing_else_changes_the_identity(folder):
    for pairs, told_apart in ((APART, True), (TOGETHER, False)):
        for pair in pairs:
            one, other = (layout(config_of(folder, **changes)) for changes in pair)
            assert (one != other) is told_apart, pair
    exact, rounded = layout(config_of(folder)), layout(config_of(folder), fidelity="fp8")
    assert exact.fidelity == "lossless"
    assert identity_root(exact, RequestIdentity()) != identity_root(rounded, RequestIdentity())


@pytest.mark.parametrize("what", ["model", "draft"])
def test_models_and_drafts_are_their_weights_wherever_they_lie(folder, tmp_path, what):
    def found(place):
        model, draft = (place, "d") if what == "model" else (folder, place)
        return layout(config_of(model, speculative_config=draft_of(draft)))

    moved = tmp_path / "deep" / folder.name
    shutil.copytree(folder, moved)
    before = found(moved)
    assert found(folder) == before
    weights = moved / "model.safetensors"
    weights.write_bytes(bytes(reversed(weights.read_bytes())))
    assert found(moved) != before


def test_what_is_read_from_elsewhere_is_named_by_address_or_content_but_not_by_credentials(folder, tmp_path):
    scales = tmp_path / "scales.json"
    scales.write_text("{}")

    def weights(**changes):
        load = {"tensorizer_uri": "s3://a", "s3_access_key_id": "a", "num_readers": 1} | changes
        media = SimpleNamespace(
            mm_encoder_fp8_scale_path=str(scales), mm_processor_kwargs=load.pop("media", None)
        )
        config = config_of(folder, load_format="tensorizer", model_config={"multimodal_config": media})
        config.load_config.download_dir = load.pop("place", "")
        config.model_config.hf_overrides = load.pop("overrides", None)
        config.load_config.model_loader_extra_config = SimpleNamespace(**load)
        return layout(config)

    before = weights()
    for changes in ({"s3_access_key_id": "b"}, {"num_readers": 9}, {"place": "/tmp"}, {"media": {}}):
        assert weights(**changes) == before, changes
    for changes in (
        {"tensorizer_uri": "s3://b"},
        {"nobody_knows": 1},
        {"media": {"do_normalize": False}},
        {"overrides": draft_of},
    ):
        assert weights(**changes) != before, changes
    assert weights(overrides=draft_of) == weights(overrides=draft_of)
    scales.write_text('{"changed": 1}')
    assert weights() != before


def test_keys_look_as_far_ahead_as_the_draft_layers(folder):
    for method, told, lookahead in (("eagle", None, 1), ("mtp", 3, 3), ("draft_model", None, 0)):
        changes = {} if told is None else {"num_prefill_lookahead_tokens": told}
        made = layout(config_of(folder, speculative_config=draft_of("d", method), **changes))
        assert made.lookahead == lookahead
        assert ("lookahead_tokens" in msgspec.to_builtins(made)) is (lookahead > 0)


HUB = {"model": "org/name", "revision": None, "hf_config_path": None, "model_weights": ""}
COMMIT = "0123456789" * 4


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        (True, {}),
        (True, {"load_format": "fastsafetensors"}),
        (False, {"load_format": "runai_streamer"}),
        (False, {"load_format": "tensorizer"}),
        (False, {"load_format": "sharded_state"}),
        (False, {"load_format": "of a plugin"}),
        (False, {"load_format": "dummy"}),
        (False, {"model_config": {"model_weights": "s3://bucket/model"}}),
        (False, {"model_config": {"model": "NO WEIGHTS"}}),
        (False, {"model_config": HUB}),
        (False, {"model_config": HUB, "commit": "main"}),
        (True, {"model_config": HUB, "commit": COMMIT}),
        (True, {"model_config": HUB | {"revision": COMMIT}}),
        (False, {"model_config": HUB | {"hf_config_path": "org/other"}, "commit": COMMIT}),
        (True, {"speculative_config": SimpleNamespace(method="ngram")}),
        (False, {"speculative_config": SimpleNamespace(method="eagle")}),
        (False, {"speculative_config": "org/draft"}),
        (True, {"speculative_config": "FOLDER"}),
    ],
    ids=repr,
)
def test_weights_are_named_only_by_files_in_the_folder_or_a_commit_of_a_hub(folder, tmp_path, named, changes):
    changes = dict(changes)
    empty = tmp_path / "empty"
    empty.mkdir()
    if changes.get("model_config", {}).get("model") == "NO WEIGHTS":
        changes["model_config"] = {"model": str(empty)}
    draft = changes.get("speculative_config")
    if isinstance(draft, str):
        changes["speculative_config"] = draft_of(folder if draft == "FOLDER" else draft)
    assert weights_are_named(config_of(folder, **changes)) is named


def test_each_start_and_each_data_parallel_rank_is_a_group_of_its_own(folder):
    groups = {
        engine_group(config_of(folder, **changes))
        for changes in ({}, {"engine_id": "f"}, {"instance_id": "j"}, {"data_parallel_rank": 1})
    }
    assert len(groups) == 4 and {len(group) for group in groups} == {16}
    assert engine_group(config_of(folder)) in groups


def test_fingerprint_of_large_files_reads_samples_over_the_whole_file(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprints, "SAMPLE_BYTES", 16)
    path = tmp_path / "model.safetensors"
    data = bytearray(16 * 256 * 10)
    path.write_bytes(data)
    before = fingerprint(tmp_path)
    for place in (0, len(data) - 1):
        changed = bytearray(data)
        changed[place] = 1
        path.write_bytes(changed)
        assert fingerprint(tmp_path) != before
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    for name, weights in (("config.json", False), ("model.py", False), ("model.bin", True)):
        before = fingerprint(nothing)
        (nothing / name).write_bytes(b"{}")
        assert fingerprint(nothing) != before
        assert has_weights(nothing) is has_weights(nothing / name) is weights
