"""`kvstrata sim`: a simulated engine behind vLLM's HTTP interface and KV events.

kvstrata sim --port 8000 --model llama --kv-events-endpoint tcp://127.0.0.1:5557
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence

import msgspec

from kvstrata.cli.bench import whole
from kvstrata.cli.boundary import guarded
from kvstrata.errors import ConfigError
from kvstrata.testing.engine_sim.connected import ConnectedEngine
from kvstrata.testing.engine_sim.engine import SimEngine
from kvstrata.testing.engine_sim.engine_model import EngineModel

FLAGS = {
    "block_tokens": "tokens in a KV block",
    "kv_blocks": "blocks in the KV cache",
    "max_model_tokens": "maximum number of tokens in a request, prompt and answer together",
    "max_num_seqs": "maximum number of running requests",
    "max_num_batched_tokens": "maximum number of tokens computed in one step",
    "answer_tokens": "tokens of an answer that max_tokens does not limit",
    "step_us": "fixed time of each step",
    "prefill_token_us": "time per prompt token",
    "prefill_pair_us": "time per pair of a prompt token and a token it attends to",
    "decode_sequence_us": "time per decoding sequence",
    "decode_context_token_us": "time per token that a decoding sequence attends to",
}
"""Fields of EngineModel that are flags."""


MAX_RANKS = 64
TOKEN_BYTES = 1024


def parser() -> argparse.ArgumentParser:
    """The command line of `kvstrata sim`."""
    top = argparse.ArgumentParser(
        prog="kvstrata sim",
        description="A simulated engine with vLLM's HTTP interface. It computes nothing, but takes as long as an "
        "engine with continuous batching and paged blocks. A token is a byte of a text, or an id in the prompt.",
    )
    add = top.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add(
        "--port",
        type=whole(0, 65_535),
        default=8000,
        metavar="N",
        help="port to listen on; 0 takes a free one (%(default)s)",
    )
    add("--model", default="sim", metavar="NAME", help="name of the served model (%(default)s)")
    add("--adapter", action="append", default=[], metavar="NAME",
        help="name of a LoRA adapter, served as a further model; repeatable (none)")  # fmt: skip
    add("--speed", type=_speed, default=1.0, metavar="X",
        help="run X times as fast as real time (%(default)g)")  # fmt: skip
    defaults = msgspec.to_builtins(EngineModel())
    for name, meaning in FLAGS.items():
        kind = int if isinstance(defaults[name], int) else float
        add(f"--{name.replace('_', '-')}", type=kind, metavar="N" if kind is int else "US",
            help=f"{meaning} ({defaults[name]})")  # fmt: skip
    add("--data-parallel-size", type=whole(1, MAX_RANKS), default=1, metavar="N",
        help="data-parallel ranks behind the port, each with its own cache and queue; rank R publishes events R ports "
        "higher, and the header X-data-parallel-rank: R selects it (%(default)s)")  # fmt: skip
    add("--kv-transfer-config", default="", metavar="JSON",
        help="as for vLLM with LMCacheConnectorV1: load KV from a server on this machine, and store it there "
        "(none)")  # fmt: skip
    add("--kv-token-bytes", type=int, metavar="N",
        help=f"bytes of one token's KV that are copied to and from that server ({TOKEN_BYTES})")  # fmt: skip
    add("--no-prefix-caching", action="store_true", help="turn prefix caching off")
    add("--kv-events-endpoint", default="", metavar="ENDPOINT",
        help="ZMQ endpoint that publishes KV events, such as tcp://127.0.0.1:5557 (none)")  # fmt: skip
    add("--kv-events-replay-endpoint", default="", metavar="ENDPOINT",
        help="ZMQ endpoint that resends published events (none)")  # fmt: skip
    add("--kv-events-topic", default="", metavar="TEXT", help="topic of the events (empty)")
    add(
        "--enable-scale-out",
        action="store_true",
        help="serve the paths that end in /render, which otherwise answer 403",
    )
    return top


@guarded("kvstrata sim")
def main(arguments: Sequence[str] | None) -> int:
    """Serve until SIGINT or SIGTERM; returns 0. Raises ConfigError."""
    options = parser().parse_args(arguments)
    if options.kv_events_replay_endpoint and not options.kv_events_endpoint:
        raise ConfigError(
            "--kv-events-replay-endpoint: has no effect without --kv-events-endpoint; give that too",
            field="kv-events-replay-endpoint",
        )
    if len({options.model, *options.adapter}) != 1 + len(options.adapter):
        raise ConfigError("--adapter: names must differ from each other and from --model", field="adapter")
    model = _model(options)
    make_engine = _engine_maker(options)
    from kvstrata.testing.engine_sim.process import SimSettings, run

    settings = SimSettings(
        host=options.host,
        port=options.port,
        served=(options.model, *options.adapter),
        model=model,
        speed=options.speed,
        events_endpoint=options.kv_events_endpoint,
        replay_endpoint=options.kv_events_replay_endpoint,
        topic=options.kv_events_topic,
        renders=options.enable_scale_out,
        ranks=options.data_parallel_size,
        make_engine=make_engine,
    )
    return run(settings, say)


def say(line: str) -> None:
    """Write a line to standard error at once: a log line of another thread must not come between it and its end."""
    sys.stderr.write(f"kvstrata sim: {line}\n")
    sys.stderr.flush()


def _engine_maker(options: argparse.Namespace) -> Callable[[EngineModel], SimEngine]:
    given = options.kv_token_bytes is not None
    if not options.kv_transfer_config:
        if given:
            raise ConfigError(
                "--kv-token-bytes: has no effect without --kv-transfer-config; give that too",
                field="kv-token-bytes",
            )
        return SimEngine
    if options.speed != 1.0:
        raise ConfigError(
            f"--speed: must be 1 with --kv-transfer-config, found {options.speed:g}: the server's lookups and copies "
            "take real time; leave it out",
            field="speed",
        )
    token_bytes = options.kv_token_bytes if given else TOKEN_BYTES
    if token_bytes < 1:
        raise ConfigError(
            f"--kv-token-bytes: must be at least 1, found {token_bytes}", field="kv-token-bytes"
        )
    from kvstrata.connectors.sim.connector import SimConnector
    from kvstrata.connectors.sim.transfer import read_transfer

    logging.basicConfig(format="kvstrata sim: %(message)s")
    transfer, notes = read_transfer(options.kv_transfer_config, os.environ)
    for note in notes:
        logging.getLogger("kvstrata").warning("%s", note)

    def make(model: EngineModel) -> SimEngine:
        return ConnectedEngine(
            model, SimConnector(transfer, model, model=options.model, token_bytes=token_bytes)
        )

    return make


def _model(options: argparse.Namespace) -> EngineModel:
    fields = {name: value for name in FLAGS if (value := getattr(options, name)) is not None}
    return EngineModel(
        **fields, kv_events=bool(options.kv_events_endpoint), prefix_caching=not options.no_prefix_caching
    )


def _speed(text: str) -> float:
    value = float(text)
    if not 1e-3 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"must be a number from 0.001 to 1e+06, found {text!r}")
    return value
