"""What recent requests had in common."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.rpc.cluster_wire import AskShared
from kvstrata.server.cluster.shared import FEWEST, MAX_NOTED, WINDOW_S, SharedPrefixes, shared_ends, told
from kvstrata.server.processes import DeclaredIdentity, EngineGroup
from kvstrata.types import KEY_BYTES, RequestIdentity
from tests.harness.cache_engine import CHUNK_TOKENS, layout_identity

CHAINS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=12)


def chain(text: str) -> bytes:
    """Chain keys as a prompt has them: each says what comes before it too."""
    return b"".join(text[: end + 1].encode().ljust(KEY_BYTES, b".") for end in range(len(text)))


@given(CHAINS)
def test_shared_prefixes_are_those_that_some_have_in_common_and_that_no_longer_one_has_as_often(texts):
    chains = sorted(map(chain, texts))
    counts = {}
    for text in texts:
        for end in range(len(text)):
            counts[text[: end + 1]] = counts.get(text[: end + 1], 0) + 1
    ends = {
        prefix: count
        for prefix, count in counts.items()
        if count > 1 and not any(counts.get(prefix + more, 0) == count for more in "abc")
    }
    found = {}
    for depth, before, first, requests in shared_ends(chains):
        prefix = chains[first][: depth * KEY_BYTES]
        [text] = {text for text in counts if chain(text) == prefix}
        found[text] = requests
        assert before == max((len(one) for one in ends if text.startswith(one) and one != text), default=0)
    assert found == ends


class Clock:
    now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_ms(self) -> int:
        raise NotImplementedError


class Scene:
    def __init__(self) -> None:
        self.clock = Clock()
        self.prefixes = SharedPrefixes(self.clock)
        self.group = EngineGroup(b"", layout_identity(), 1, complete=True, prompt_tokens_s=1_000.0)
        self.identity = DeclaredIdentity(1, layout_identity(), RequestIdentity(tenant="t"), b"r" * 32, 0)

    def ask(self, *ends: str):
        asked = AskShared([chain(end)[-KEY_BYTES:] for end in ends], [len(end) for end in ends])
        return told(*self.prefixes.take(), asked)


@pytest.fixture
def scene(monkeypatch) -> Scene:
    made = Scene()
    made.group.slices, made.group.packed_slices = [b"s" * 32], b"s" * 32
    monkeypatch.setattr(EngineGroup, "record_limits", [1 << 20])
    return made


def test_requests_are_counted_once_by_the_prefixes_that_are_asked_for_and_forgotten_with_time(scene):
    for text, served in (("aab", 1), ("aac", 3), ("aa", 0), ("b", 1)):
        scene.prefixes.note(scene.identity, scene.group, chain(text), served)
    scene.clock.now_s += 10
    found = scene.ask("aa", "b", "c")
    [prefix] = found.prefixes
    assert (prefix.chain, prefix.own_chunks, prefix.tenant) == (chain("aa"), 2, "t")
    assert prefix.requests_s == pytest.approx(0.3) and 0.9 < prefix.compute_s * 1000 / 2 / CHUNK_TOKENS < 1.1
    assert (found.asked, found.served) == ([3, 1, 0], [1, 1, 0])
    assert scene.ask("aa").asked == [0], "it was counted before"
    assert len(scene.ask().prefixes) == 1, "it is hot still"
    scene.clock.now_s += WINDOW_S
    assert scene.ask().prefixes == []


def test_too_many_requests_shorten_the_time_that_is_told_and_not_the_rate(scene):
    for number in range(3 * MAX_NOTED):
        scene.clock.now_s += 0.01
        scene.prefixes.note(scene.identity, scene.group, chain("ab") + os.urandom(32), number % 2)
    found = scene.ask("ab")
    assert found.prefixes[0].requests_s == pytest.approx(100, rel=0.01)
    assert found.asked[0] / found.seconds == pytest.approx(100, rel=0.01)
    assert len(scene.prefixes.take()[0]) <= MAX_NOTED


def test_what_too_few_had_in_common_is_not_told(scene):
    for _ in range(FEWEST - 1):
        scene.prefixes.note(scene.identity, scene.group, chain("ab"), 0)
    assert scene.ask().prefixes == []
