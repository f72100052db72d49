"""Our connector inside the classes of each supported version of vLLM, without a model (`versions_run.py`)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from kvstrata.config.lmcache.interfaces import CONNECTORS
from tests.harness import vllm_env
from tests.tools import vllm_python as pythons
from tests.tools.provision import ROOT

pytestmark = pytest.mark.vllm

SCRIPT = Path(__file__).with_name("versions_run.py")


NEWEST = pythons.PYTHON_ONLY[-1]
VERSIONS = [
    pytest.param(version, marks=() if version == NEWEST else pytest.mark.long)
    for version in pythons.checked()
]


@pytest.fixture(scope="module", params=VERSIONS)
def results(request, vllm_python, tmp_path_factory):
    """The script's results, one dictionary each."""
    folder = tmp_path_factory.mktemp("versions")
    try:
        in_front = pythons.on_path(request.param)
    except pythons.Unavailable as unavailable:
        pytest.skip(str(unavailable))
    environment = vllm_env.environment(folder, in_front)
    environment["PYTHONPATH"] += f"{os.pathsep}{ROOT}"  # the script imports tests.vllm.versions_engine
    done = subprocess.run(
        [str(vllm_python), "-P", str(SCRIPT), str(folder)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert found[0] == {"check": "version", "version": request.param}
    return found


def of(results, check):
    """The results of one check; there is at least one."""
    found = [result for result in results if result["check"] == check]
    assert found, f"the script gave no result of {check}"
    return found


def test_every_module_of_the_connector_can_be_imported(results):
    [imports] = of(results, "imports")
    assert {"connector", "scheduler", "worker", "plugin"} <= set(imports["modules"])


def test_vllm_finds_our_connector_under_each_of_lmcaches_names(results):
    """By its own factory, with and without a published module path."""
    names = of(results, "name")
    assert {name["asked"] for name in names} == set(CONNECTORS)
    assert {name["module"] for name in names} == {"kvstrata.connectors.vllm.connector"}


def test_each_method_takes_the_arguments_that_vllm_gives_it(results):
    methods = of(results, "signature")
    assert len(methods) > 20
    for method in methods:
        assert not method["wrong"], method
        assert len(set(method["kinds"])) == 1, method
    [abstract] = of(results, "abstract")
    assert abstract["methods"] == []


def test_an_engine_whose_vllm_lacks_a_needed_name_serves_without_the_cache(results):
    [needed] = of(results, "needed")
    assert needed["missing"] == [] and needed["scheduled"] == {"r": 300}
    assert not needed["planned"] and needed["errors"] == 0


def test_a_request_is_stored_loaded_and_recovered_step_by_step(results):
    """vLLM's own scheduler plans, and both of its model runners call the connector in their ways."""
    fresh = [
        {"scheduled": {"r1": 512}, "stores": [["r1", 2, [1, 2, 3, 4]]]},
        {"scheduled": {"r1": 488}, "stores": [["r1", 1, [5, 6]]]},
    ]
    for trace in of(results, "trace"):
        asynchronous = trace["asynchronous"]
        assert trace["fresh"][:2] == fresh, trace
        blocks = [8, 9, 10, 11, 12, 13]
        loads = {"loads": [["r2", 3, asynchronous, blocks]]}
        hit = (
            [{**loads, "received": ["r2"]}, {"scheduled": {"r2": 232}}]
            if asynchronous
            else [{"scheduled": {"r2": 232}, **loads}, {"scheduled": {"r2": 1}}]
        )
        assert trace["hit"][:2] == hit, trace
        failed, again = trace["failed"][:2]
        assert failed["bad"] == failed["loads"][0][3] and "stores" not in failed, trace
        assert again["scheduled"] == {"r3": 512} and again["stores"][0][1] == 2, trace
        assert trace["left"] == {"blocks": 0, "leases": 0, "tracked": 0}, trace


def test_a_load_that_fails_in_the_step_that_preempted_its_request_is_stored_again(results):
    """vLLM's cache is reset while the request runs, so the request is preempted and loaded again in one step."""
    for trace in of(results, "trace"):
        failed, *later = trace["reset"]
        [[request, chunks, _, blocks]] = failed["loads"]
        assert (failed["preempted"], failed["bad"]) == ([request], sorted(blocks)), trace
        stored = [block for step in later for _, _, found in step.get("stores", ()) for block in found]
        assert chunks == 3 and sorted(stored) == sorted(blocks), trace


def test_loads_are_synchronous_only_where_vllm_ends_a_step_before_it_plans_the_next(results):
    starts = of(results, "start")
    modes = {
        (start["case"], start["load_mode"]): start.get("refused", start.get("sync_load_bytes"))
        for start in starts
        if "load_mode" in start
    }
    assert modes.pop(("one step", "auto")) == modes.pop(("one step", "sync")) == 256 << 20
    for case in ("asynchronous scheduling", "two stages"):
        assert (modes.pop((case, "auto")), modes.pop((case, "sync"))) == (0, "load_mode")
    assert not modes
    [experts] = [start for start in starts if start["case"] == "routed experts"]
    assert (experts["may_load"], experts["may_store"]) == (False, True)


def test_drafts_over_several_stages_are_refused_on_the_v1_model_runner(results):
    drafts = [start for start in of(results, "start") if start["case"] == "two stages with drafts"]
    assert {start["v2"]: start.get("refused") for start in drafts} == {
        False: "speculative_config",
        True: None,
    }


def test_each_group_that_vllm_makes_has_the_rule_of_its_layers(results):
    verdicts = {result["case"]: (result["kinds"], result["verdict"]) for result in of(results, "groups")}
    uniform, whole = ["UniformTypeKVCacheSpecs"], ["prefix", 128, 2, 0]
    assert verdicts.pop("full") == (["FullAttentionSpec"], [whole])
    assert verdicts.pop("latents") == (["MLAAttentionSpec"], [whole])
    assert verdicts.pop("latents and indexer") == (uniform, [whole])
    assert verdicts.pop("full of two sizes") == (uniform, [whole])
    window = ["last_window", 128, 2, 2]
    kinds, groups = verdicts.pop("windows and full")
    assert set(kinds) == {"FullAttentionSpec", "SlidingWindowSpec"}
    assert [window if "Sliding" in kind else whole for kind in kinds] == groups
    assert verdicts.pop("windows") == (["SlidingWindowSpec"], [window])
    assert verdicts.pop("attention in chunks") == (
        ["ChunkedLocalAttentionSpec"],
        [["last_window", 128, 2, 1]],
    )
    kinds, verdict = verdicts.pop("states")
    assert kinds == ["MambaSpec"] and "set chunk_size to 128" in verdict
    kinds, verdict = verdicts.pop("states without prefix caching")
    assert kinds == ["MambaSpec"] and "mamba_cache_mode is 'none'" in verdict
    assert not verdicts


def test_windows_are_stored_loaded_and_recovered_step_by_step(results):
    """vLLM's own scheduler keeps the blocks of full attention and of windows in tables of their own."""
    for trace in of(results, "group trace"):
        stores = [[name, chunks] for step in trace["fresh"] for name, chunks, _ in step.get("stores", ())]
        assert stores == [["r1", 2], ["r1", 1], ["r1", 1]], (
            "three chunks, and the window before the prompt's end"
        )
        hit, after, *_ = trace["hit"]
        assert [load[:3] for load in hit["loads"]] == [["r2", 3, True], ["r2", 1, True]], trace
        assert hit["received"] == ["r2"] and after == {"scheduled": {"r2": 232}}, trace
        failed, again, *_ = trace["failed"]
        assert (failed["received"], failed["not_loaded"]) == (["r3"], ["r3"]) and "bad" not in failed, trace
        assert again["scheduled"] == {"r3": 512} and again["stores"][0][1] == 2, trace
        assert trace["left"] == {"blocks": 0, "leases": 0, "tracked": 0}, trace


def test_a_failed_load_is_reported_in_its_own_step_and_nothing_computed_on_it_is_stored(results):
    """With a draft model, vLLM ends the step's copies after it has collected the step's report."""
    reports = of(results, "reports")
    assert {(each["runner"], each["drafts"], each["on_device"]) for each in reports} == {
        (runner, drafts, on_device)
        for runner in ("v1", "v2")
        for drafts in (False, True)
        for on_device in (False, True)
    }
    for each in reports:
        assert each["bad"] == [[4, 5, 6, 7], [], [], [], []], each
        assert each["failures"][0] == [1], each
        assert (each["dropped"], each["stored"], each["made"]) == ([1, 2], [3], [3]), each
        assert [request for sent in each["sent"] for request in sent] == ["ended"], each


def test_no_copy_touches_kv_memory_that_vllm_has_unmapped_in_its_sleep(results):
    """vLLM's worker sleeps and wakes; versions that do not tell a connector of sleep are included."""
    sleeps = {result["way"]: result for result in of(results, "sleep")}
    once = ["suspend", "unmapped", "mapped", "resume"]
    assert sleeps.keys() >= {"sleep", "in parts"}
    for way, events, stores in (
        ("sleep", once, [False, True]),
        ("discard", once, [False, True]),
        # Weights wake first: KV memory is still unmapped then.
        ("in parts", ["suspend", "unmapped", "mapped", "mapped", "resume"], [False, False, True]),
    ):
        if way not in sleeps:
            continue
        assert (sleeps[way]["events"], sleeps[way]["stores"]) == (events, stores), sleeps[way]
        assert sleeps[way]["supports"], "vLLM would refuse --enable-sleep-mode"


def test_every_method_that_vllm_calls_while_it_serves_is_guarded(results):
    guards = {result["method"]: result for result in of(results, "guard")}
    # These are called at the start only, or do nothing.
    unguarded = {"register_kv_caches", "save_kv_layer", "requires_kv_delivery"}
    unguarded |= {"build_kv_connector_stats", "build_prom_metrics"}
    # An error of these stops vLLM's sleep, which would unmap memory that a copy touches. They exist from vLLM 0.33 on.
    unguarded |= guards.keys() & {"unregister_kv_caches", "restore_kv_caches"}
    assert {name for name, result in guards.items() if not result["guarded"]} == unguarded
    for name, answer in (("get_num_new_matched_tokens", "(0, False)"), ("request_finished", "(True, None)")):
        assert guards[name]["answers"] == [answer] * 2


def test_no_error_inside_the_connector_ends_the_engine_or_keeps_anything(results):
    """One internal function always raises: both requests end, and their blocks and leases are given back."""
    errors = of(results, "error")
    assert len(errors) > 100 and any(error["windows"] for error in errors)
    for error in errors:
        assert not error["raised"] and error["unfinished"] == 0, error
        assert error["left"]["blocks"] == error["left"]["tracked"] == 0, error
        # When releasing fails, the server takes the leases back.
        assert error["left"]["leases"] == 0 or error["internal"] == "client.release", error
        # The model waits for sections of synchronous loads only.
        if (error["internal"], error["asynchronous"]) != ("copies.await_section", True):
            assert error["errors"] > 0, error


def test_keys_change_with_the_weights_and_return_with_the_first_ones(results):
    """vLLM tells its connector of a pause, but not that its prefix cache was emptied after a reload of weights."""
    weights = {result["how"]: result for result in of(results, "weights")}
    assert weights.pop("while a request runs")["stale"]
    assert {how for how, result in weights.items() if not result["waited"]} == {"at the start"}
    new = weights["prefix cache emptied, new weights"]["adapters"]
    assert len(new) == 1 and new[0].startswith('["weights",')
    for how, result in weights.items():
        assert result["adapters"] == (new if "new weights" in how else [""]), how


def test_a_digest_of_the_weights_sees_every_parameter_and_nothing_else(results):
    digests = {result["change"]: result["seen"] for result in of(results, "digest")}
    unseen = {"none", "another start", "all changed back", "no runner", "state"}
    assert {change for change, seen in digests.items() if not seen} == unseen
    told = {result["how"]: (result["initial"], result["told"]) for result in of(results, "unnamed")}
    assert told == {
        "load format": ("unnamed", True),
        "of its own": ("unnamed", True),
        "packed": ("unnamed", False),
    }


def test_a_worker_notices_when_it_has_another_adapter_than_it_told(results):
    still = {result["how"]: result["still"] for result in of(results, "adapter")}
    assert {how for how, has in still.items() if has} == {
        "loaded",
        "evicted",
        "loaded again",
        "equal elsewhere",
    } | {
        "files replaced"  # vLLM has not read them
    }
    assert len(still) == 10


def test_each_setting_is_in_the_identity_or_on_the_list_of_harmless_ones(results):
    """A setting that a new version of vLLM brings is in the identity until it is put on the list."""
    settings = of(results, "setting")
    assert len(settings) > 90
    assert [each["name"] for each in settings if each["seen"] is each["listed"]] == []
    assert all(each["same"] for each in of(results, "same settings"))


def test_engines_of_all_versions_share_kv_while_settings_are_vllms_defaults(results):
    """A setting that a new version brings, and whose default does something, parts it from earlier versions."""
    [default] = of(results, "default settings")
    assert default["facts"] == {
        "load_config": {"load_format": "folder", "ignore_patterns": ["original/**/*"]},
        "attention_config": {"indexer_kv_dtype": "auto"},
        "mamba_config": None,
        "model_config": {
            **dict.fromkeys(("runner", "convert", "tokenizer_mode", "model_impl"), "auto"),
            "dtype": "torch.float32",
        },
        "multimodal_config": {"mm_device_do_normalize": True, "video_pruning_method": "evs"},
    }


def test_a_tenant_in_the_body_of_a_request_reaches_the_connector(results):
    paths = {result["path"]: result["params"] for result in of(results, "api")}
    assert set(paths) == {"/v1/completions", "/v1/chat/completions", "/v1/responses"}
    assert all(params == {"kvstrata.tenant": "blue"} for params in paths.values()), paths


def test_tenants_salts_and_adapters_share_no_chunk_and_no_block_of_vllms_own_cache(results):
    kinds = {result["case"]: result for result in of(results, "request kind")}
    stored = {}
    for case, kind in kinds.items():
        skipped = {"nobody's": ["tenant_refused"], "embeddings": ["prompt_embeds"]}
        name = case.removesuffix(" again").removeprefix("other ")
        assert kind["skipped"] == skipped.get(name, []), kind
        found = 512 if case.endswith(" again") and name not in skipped else 0
        assert kind["found_by_vllm"] == found, kind
        if name in skipped:
            assert kind["stored"] == []
        elif not case.endswith(" again"):
            [stored[case]] = {tuple(identity) for identity in kind["stored"]}
    adapters = [stored.pop(f"adapter {name}") for name in ("one", "other")]
    assert stored == {
        "plain": ("", "", ""),
        "blue": ("", "blue", ""),
        "green": ("", "green", ""),
        "blue, salt": ("", "blue", "pepper"),
        "salt": ("", "", "pepper"),
        "other salt": ("", "", "sugar"),
    }
    assert adapters[0] != adapters[1] and all(adapter and not tenant for adapter, tenant, _ in adapters)


def test_arrangements_have_one_name_in_two_versions_exactly_if_both_pack_alike(results):
    [packing] = of(results, "packing")
    alike, again = packing["alike"]
    assert alike == again and alike.startswith("#") and packing["turned"] not in (alike, "@0.99")
    assert packing["not_asked"] == ["@0.98", "@0.99"]
    assert packing["asked"] == [3, 3], (
        "layers that are alike are asked once: for all heads, the first and the last"
    )
    (whole, half), mixed = packing["half"]
    assert whole == half == alike, "ranks with fewer heads, each packed by itself"
    assert len({alike, *mixed}) == 3, "here the heads are not packed by themselves"
