"""Every way on which a reason reaches an outcome that gives a chunk up ends at words that are known here.

`test_reasons_named.py` sees that an outcome names a reason.  This test follows those that arrive in a variable, by
`THROUGH`: for each such expression the places where its words come from.  A new expression fails until it is listed.
"""

from __future__ import annotations

import ast
import enum
import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from kvstrata.native.status import reasons
from kvstrata.policy.reasons import MEANINGS, OTHER, miss_reason
from kvstrata.policy.store import Skip
from kvstrata.rpc.wire import ReserveOutcome
from kvstrata.types import MissReason
from tests.unit.policy.test_reasons_named import SRC, TREES, outcomes, reason_of

OF_MEDIA = {
    "busy": "a Redis that runs a script", "changed": "an object that was replaced between two parts of a read",
    "cluster_down": "a Redis Cluster without an owner of the slot", "code_": "an error code of Mooncake, which follows",
    "denied": "credentials", "injected": "the adapter that fails on purpose", "lease_expired": "Mooncake",
    "loading": "a Redis that starts", "lost": "a connection that broke", "no_bucket": "an object store",
    "no_segment": "Mooncake without memory", "parameters": "Mooncake", "protocol": "a server that is something else",
    "rpc": "Mooncake", "server_error": "any other error of a Redis", "slow_down": "an object store",
    "unreachable": "no connection",
}  # fmt: skip
"""Words of media that stand in no table of the policy: a chunk that could not be loaded is `l2_failed` to engines."""
ONLY_OF_PUTS = {"capacity", "disk_full", "no_janitor", "no_room", "parameters", "backlog", "cleared", "draining",
                "evicted", "removed", "worker_crashed"}  # fmt: skip
"""Words that end puts only: the chunk stays in L1, and is `put_skipped` when it has left."""


def files(name: str) -> Iterator[tuple[str, ast.Module]]:
    """(Path below src/kvstrata, tree) of the files that `name` names: a path, or "" for all."""
    for path, tree in TREES.items():
        below = path.relative_to(SRC).as_posix()
        if name in ("", below):
            yield below, tree


CALLS: dict[str, list[tuple[str, ast.Call]]] = {}
"""Calls by the last name of what is called, each with its file."""
for _file, _tree in files(""):
    for _node in ast.walk(_tree):
        if isinstance(_node, ast.Call) and isinstance(_node.func, ast.Name | ast.Attribute):
            _name = _node.func.id if isinstance(_node.func, ast.Name) else _node.func.attr
            CALLS.setdefault(_name, []).append((_file, _node))


def plain(file: str, node: ast.expr | None) -> set[str] | None:
    """The words of an expression that names them: a string, a constant of the module, a choice of these; else None."""
    match node:
        case ast.Constant(value=str() as word):
            return {word} if word else set()
        case ast.Name() | ast.Attribute():
            module = importlib.import_module("kvstrata." + file.removesuffix(".py").replace("/", "."))
            try:
                value = eval(ast.unparse(node), vars(module))
            except (NameError, AttributeError):
                return None
            return {str(value)} if isinstance(value, str) else None
        case ast.IfExp(body=body, orelse=other):
            return together(file, [body, other])
        case ast.BoolOp(values=values):
            return together(file, values)
        case ast.JoinedStr(values=[ast.Constant(value=str() as start), *_]):
            return {start}
        case ast.Subscript(value=ast.Dict(values=values)):
            return together(file, values)
        case ast.Call(func=ast.Attribute(value=ast.Dict(values=values), attr="get"), args=[_, other]):
            return together(file, [*values, other])
        case ast.Dict(values=values):
            return together(file, values)
        case ast.Call(func=ast.Attribute(value=ast.Name(id=table), attr="get"), args=[_, *other]):
            module = importlib.import_module("kvstrata." + file.removesuffix(".py").replace("/", "."))
            if table in vars(module):
                rest = together(file, other)
                return None if rest is None else set(vars(module)[table].values()) | rest
    return None


def together(file: str, nodes: list[ast.expr]) -> set[str] | None:
    words: set[str] = set()
    for node in nodes:
        found = followed(file, node)
        if found is None:
            return None
        words |= found
    return words


def followed(file: str, node: ast.expr | None) -> set[str] | None:
    """The words of an expression: those that it names, or those of the places in `THROUGH`."""
    found = plain(file, node)
    if found is None and node is not None and (key := (file, ast.unparse(node))) in THROUGH:
        USED.add(key)
        if key in WORDS:
            return WORDS[key]
        found = set()
        if key not in FOLLOWING:  # `reason = reason or …` leads back to itself
            FOLLOWING.append(key)
            for origin in THROUGH[key]:
                found |= origin()
            FOLLOWING.pop()
            if not FOLLOWING:
                WORDS[key] = found
    return found


def given(callee: str, place: int, name: str = "", file: str = "") -> set[str]:
    """The words that calls of `callee` give as this argument, or by this name."""
    words: set[str] = set()
    n_calls = 0
    for below, node in CALLS.get(callee, []):
        by_name = next((word.value for word in node.keywords if word.arg == name), None)
        value = by_name or (node.args[place] if len(node.args) > place else None)
        if value is not None and file in ("", below):
            n_calls += 1
            found = followed(below, value)
            assert found is not None, f"{below}:{node.lineno}: add {ast.unparse(value)!r} to THROUGH"
            words |= found
    assert n_calls, f"nobody calls {callee}"
    return words


def returned(function: str, file: str, place: int | None = None) -> set[str]:
    """The words that a function returns, at this place of a tuple if it returns one."""
    words: set[str] = set()
    n_returns = 0
    for below, tree in files(file):
        for made in ast.walk(tree):
            if isinstance(made, ast.FunctionDef | ast.AsyncFunctionDef) and made.name == function:
                for node in ast.walk(made):
                    if isinstance(node, ast.Return) and node.value is not None:
                        value = node.value
                        if place is not None:
                            assert isinstance(value, ast.Tuple), f"{below}:{node.lineno}"
                            value = value.elts[place]
                        n_returns += 1
                        found = followed(below, value)
                        assert found is not None, (
                            f"{below}:{node.lineno}: add {ast.unparse(value)!r} to THROUGH"
                        )
                        words |= found
    assert n_returns, f"{file} has no {function}"
    return words


def assigned(name: str, file: str, function: str = "") -> set[str]:
    """The words that are assigned to this name or attribute, in this function or anywhere in the file."""
    words: set[str] = set()
    n_found = 0
    for below, tree in files(file):
        made = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        within = [node for node in made if node.name == function] if function else [tree]
        for node in (node for one in within for node in ast.walk(one)):
            targets = node.targets if isinstance(node, ast.Assign) else []
            value: ast.expr | None = node.value if isinstance(node, ast.Assign) else None
            if isinstance(node, ast.AnnAssign | ast.NamedExpr):
                targets, value = [node.target], node.value
            for target in targets:
                pairs = [(target, value)]
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    pairs = list(zip(target.elts, value.elts, strict=True))
                for one, what in pairs:
                    if ast.unparse(one) == name and what is not None:
                        n_found += 1
                        found = followed(below, what)
                        assert found is not None, (
                            f"{below}:{node.lineno}: add {ast.unparse(what)!r} to THROUGH"
                        )
                        words |= found
    assert n_found, f"{file} assigns nothing to {name}"
    return words


def native() -> set[str]:
    """The words of native adapters: those of the enum Reason, which a table in C++ names exhaustively."""
    return {row.word for row in reasons()} - {"sessions_full"}  # the pool's, which no adapter gives


def passed_on() -> set[str]:
    """The outcome of an inner adapter, whose own places are walked, or of one of third parties."""
    return set()


def members(of: type[enum.Enum]) -> set[str]:
    return {str(one.value) for one in of}


RESP, OBJECTS, MOONCAKE = "storage/media/resp", "storage/media/object_store", "storage/media/mooncake"
lost = partial(given, "LinkLost", 0)
THROUGH: dict[tuple[str, str], list[Any]] = {
    # Owners of other instances.
    ("p2p/finding.py", "asked.reason"): [partial(given, "Asked", 0, "reason", "p2p/finding.py")],
    ("p2p/finding.py", "reason"): [
        partial(assigned, "reason", "p2p/finding.py", "_ask"), partial(returned, "_ask_named", "p2p/finding.py", 1),
        partial(assigned, "reason", "p2p/finding.py", "_ask_each"),
        partial(assigned, "reason", "p2p/finding.py", "_lease_each"),
    ],
    ("p2p/finding.py", "word"): [
        partial(assigned, "word", "p2p/finding.py"), partial(returned, "_lease_at", "p2p/finding.py", 1),
    ],
    ("p2p/reading.py", "reason"): [partial(returned, "_transfer", "p2p/reading.py")],
    ("p2p/tier.py", "reason"): [partial(assigned, "reason", "p2p/tier.py")],
    ("p2p/tier.py", "asked.reason"): [partial(given, "Asked", 0, "reason", "p2p/finding.py")],
    # The server.
    ("server/l2/prefetch.py", "cut_short"): [partial(assigned, "cut_short", "server/l2/prefetch.py")],
    ("server/l2/puts.py", "self.cut_short"): [partial(members, Skip)],
    # Adapters in another process, and native ones.
    ("storage/base.py", "reason"): [native, passed_on],
    ("storage/host/channel.py", "reason"): [passed_on],
    ("storage/host/parent.py", "why_not"): [partial(returned, "ask", "storage/host/life.py", 1)],
    ("storage/native_adapter.py", "why"): [native, passed_on],
    ("storage/native_adapter.py", "reason"): [partial(returned, "_not_ready", "storage/native_adapter.py")],
    ("storage/native_adapter.py", "self._not_ready()"): [
        partial(returned, "_not_ready", "storage/native_adapter.py")
    ],
    # Media.
    (f"{MOONCAKE}/adapter.py", "_reason(code)"): [partial(returned, "_reason", f"{MOONCAKE}/adapter.py")],
    (f"{MOONCAKE}/adapter.py", "self._not_ready()"): [partial(returned, "_not_ready", f"{MOONCAKE}/adapter.py")],
    (f"{MOONCAKE}/adapter.py", "reason"): [partial(returned, "_not_ready", f"{MOONCAKE}/adapter.py")],
    (f"{OBJECTS}/adapter.py", "self._note(error)"): [partial(returned, "_note", f"{OBJECTS}/adapter.py")],
    (f"{OBJECTS}/adapter.py", "reason"): [partial(returned, "reason_of", f"{OBJECTS}/failures.py")],
    (f"{OBJECTS}/adapter.py", "part.reason"): [partial(returned, "reason_of", f"{OBJECTS}/failures.py")],
    (f"{OBJECTS}/failures.py", "words.get(system[1], 'io')"): [partial(assigned, "words", f"{OBJECTS}/failures.py")],
    (f"{OBJECTS}/failures.py", "word"): [lambda: {"timeout", "unreachable"}],
    (f"{RESP}/adapter.py", "reason_of(answer)"): [partial(returned, "reason_of", f"{RESP}/replies.py")],
    (f"{RESP}/adapter.py", "reason_of(reply)"): [partial(returned, "reason_of", f"{RESP}/replies.py")],
    (f"{RESP}/adapter.py", "reason"): [partial(returned, "reason_of", f"{RESP}/replies.py")],
    (f"{RESP}/adapter.py", "answer.reason"): [lost],
    (f"{RESP}/servers.py", "reason"): [passed_on],  # that of the node's last LinkLost
    (f"{RESP}/servers.py", "lost.reason"): [passed_on],
    (f"{RESP}/servers.py", "reason_of(reply)"): [partial(returned, "reason_of", f"{RESP}/replies.py")],
    # Wrappers.
    ("storage/wrap/codec.py", "known.cannot"): [
        partial(given, "Lengths", 3), partial(returned, "cannot_decode", "storage/wrap/codec_chain.py"),
    ],
    ("storage/wrap/codec.py", "error.reason"): [partial(given, "CannotDecode", 0)],
    ("storage/wrap/codec.py", "reason"): [partial(assigned, "reason", "storage/wrap/codec.py")],
    ("storage/wrap/codec_chain.py", "reason"): [
        partial(returned, "cannot_decode", "storage/wrap/codec_chain.py")
    ],
    ("storage/wrap/deadline.py", "self._shut"): [partial(given, "shut", 0, file="server/l2/media.py")],
    ("storage/wrap/deadline.py", "reason"): [partial(assigned, "reason", "storage/wrap/deadline.py", "load")],
    ("storage/wrap/deadline.py", "failed.reason"): [partial(given, "_Failed", 0)],
}  # fmt: skip
"""(File, expression) → where its words come from."""
USED: set[tuple[str, str]] = set()
FOLLOWING: list[tuple[str, str]] = []
WORDS: dict[tuple[str, str], set[str]] = {}
"""The words of those entries of THROUGH that were followed to their ends."""


def of_any_status() -> Iterator[tuple[str, ast.Call, int]]:
    """(Where, the call, place of its reason) of each outcome whose status comes from native code or in a variable."""
    for file, tree in files(""):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "PutOutcome",
                "LoadOutcome",
                "Found",
            ):
                place = 2 if ast.unparse(node.func) == "Found" else 1
                literal = isinstance(node.args[0], ast.Attribute) and node.args[0].attr.isupper()
                if not literal and reason_of(node, place) is not None:
                    yield f"{file}:{node.lineno}", node, place


def sites() -> list[tuple[str, str, set[str] | None]]:
    """(Where, the expression, its words) of each outcome that gives a chunk up."""
    found = []
    for where, call, place in (*outcomes(), *of_any_status()):
        node = reason_of(call, place)
        file = where.rpartition(":")[0]
        found.append((where, "" if node is None else ast.unparse(node), followed(file, node)))
    return found


def test_the_words_of_every_outcome_that_gives_a_chunk_up_are_known() -> None:
    walked = sites()
    unknown = [f"{where}: {expression}" for where, expression, words in walked if words is None]
    assert unknown == [], "say in THROUGH where the words of these expressions come from"
    for where, expression, words in walked:
        assert words is not None
        strange = words - set(MEANINGS) - set(OF_MEDIA) - ONLY_OF_PUTS
        assert not strange, f"{where}: {expression}: give these words a meaning in policy/reasons.py"
    assert sum(len(words or ()) > 1 for _, _, words in walked) > 10, "the walk finds words behind variables"
    assert set(THROUGH) == USED, "these entries are not needed any more"


def test_words_of_media_have_no_meaning_that_the_policy_gives_to_others() -> None:
    assert not set(OF_MEDIA) & set(MEANINGS)
    assert {miss_reason(word) for word in OF_MEDIA} == {MissReason.L2_FAILED}


@pytest.mark.parametrize("row", reasons(), ids=lambda row: row.word)
def test_each_reason_of_the_native_code_has_a_meaning_or_ends_puts_only(row: Any) -> None:
    if row.word in native():
        assert (row.word in MEANINGS) is not (row.word in ONLY_OF_PUTS), row.word


def test_each_refusal_of_the_pool_is_a_reason() -> None:
    given_up = set(ReserveOutcome) - {ReserveOutcome.RESERVED, ReserveOutcome.PRESENT}
    for outcome in given_up:
        assert MEANINGS.get(outcome.name.lower(), OTHER) is not OTHER, outcome
