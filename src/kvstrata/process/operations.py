"""Declares the admin operations of a process's HTTP port, once for all users of the declaration:

    @operation("POST", "/v1/clear", ctl="clear")
    async def clear(parts: Admin, ask: Clear) -> Cleared:
        \"\"\"Drop the chunks of L1, L2 or both.\"\"\"

FastAPI's route and its description (process/http.py) and the subcommand of `kvstrata ctl` with its arguments
(cli/ctl.py) are made from this declaration.  `ask` is a struct: fields that the path names come from the path, the
others from the query of a GET and the body of any other method.  The first sentence of the docstring is the command's
help.

A module that declares operations loads no compiled module, since `kvstrata ctl` imports it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, ModuleType, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, cast, get_args, get_origin

import msgspec
from msgspec import Meta

from kvstrata.config.common_model import Level
from kvstrata.config.demands import demand, field_types, number_in, problems, unwrapped
from kvstrata.config.load import unusable_value
from kvstrata.errors import BadRequest
from kvstrata.observability.logging import current_level, set_level
from kvstrata.observability.numbers import MEDIA_TYPE
from kvstrata.types import KEY_BYTES, RequestIdentity

MAX_TOKENS = 4_194_304
"""Maximum number of token ids in one request."""
MAX_KEYS = 65_536
PIECE_BYTES = 64 << 10
"""A long list is decoded in pieces of this size, since a decoder keeps the interpreter until it is done."""
MAX_REST_BYTES = 64 << 10
MAX_WAIT_S = 60.0
MAX_CLAIM_S = 30 * 86_400

Function = TypeVar("Function", bound=Callable[..., Any])
Headers = Mapping[bytes, bytes]
Token = Annotated[int, Meta(ge=0, lt=1 << 32)]
Tokens = Annotated[list[Token], Meta(max_length=MAX_TOKENS)]
_PATH_FIELD = re.compile(r"{(\w+)(?::path)?}")
_LONG_LIST = re.compile(rb'"(tokens|keys)"\s*:\s*\[')
_LONG_ITEMS: dict[bytes, msgspec.json.Decoder[Any]] = {
    b"tokens": msgspec.json.Decoder(list[Token]),
    b"keys": msgspec.json.Decoder(list[str]),
}


class Reply(NamedTuple):
    """An answer with a status or headers of its own."""

    value: Any
    """Bytes are sent unchanged, any other value as JSON."""
    status: int = 200
    headers: Mapping[str, str] = MappingProxyType({})
    media_type: str = "application/json"

    @property
    def body(self) -> bytes:
        """The bytes of the answer."""
        return self.value if isinstance(self.value, bytes) else msgspec.json.encode(self.value)


class Operation(NamedTuple):
    """The declaration of one operation."""

    method: str
    path: str
    """Path in FastAPI's form: `{name}`, or `{name:path}` for a value that may contain slashes."""
    run: Callable[..., Any]
    """Called with the parts of the process, and, if it has parameters of these names, `ask`, `headers` and `target`."""
    ask: type[msgspec.Struct]
    answer: Any
    """Type of the value that is answered."""
    ctl: str = ""
    """Words of the subcommand of `kvstrata ctl`; empty for none."""
    status: int = 200
    shows: bool = False
    """`kvstrata ctl` reads the same path, if it is given nothing to write."""
    timeout_s: float = 30.0
    """Time that `kvstrata ctl` waits for the answer, in addition to the `wait_s` of the request."""
    tag: str = ""
    acts: bool = False
    """Whether only the leader among several controllers carries it out; `parts.elsewhere` names the leader."""
    here: bool = False
    """Whether it uses no parts of the process and runs on the thread of the HTTP port."""
    public: bool = False
    """Whether it needs no token."""
    hidden: bool = False
    """Whether it is omitted from the API's description."""

    @property
    def help(self) -> str:
        """The first sentence of its description."""
        return (self.run.__doc__ or "").partition("\n")[0].strip().rstrip(".")

    @property
    def in_path(self) -> list[str]:
        """The fields of `ask` that the path names."""
        return _PATH_FIELD.findall(self.path)

    async def call(self, parts: Any, words: Mapping[str, Any]) -> Any:
        """Run it with those of these arguments that it accepts. Raises KvstrataError."""
        if self.acts and (moved := parts.elsewhere(words["target"])) is not None:
            return moved
        taken = {name: words[name] for name in self.run.__annotations__ if name in words}
        made = self.run(parts, **taken)
        return await made if inspect.isawaitable(made) else made

    @property
    def texts(self) -> type[msgspec.Struct]:
        """The fields of `ask` that come as text, in the path or in the query."""
        return _parts(self.ask, None if self.method == "GET" else tuple(self.in_path))[0]

    @property
    def body(self) -> type[msgspec.Struct] | None:
        """The fields of `ask` that come as JSON; None if there are none."""
        return _parts(self.ask, None if self.method == "GET" else tuple(self.in_path))[1]


class Error(msgspec.Struct):
    """Body of an answer that is an error."""

    code: Annotated[
        str,
        Meta(
            description="Stable error code (docs/internals/protocol.md); `not_found` for an unknown resource."
        ),
    ]
    message: Annotated[str, Meta(description="What is wrong and what to change, as text.")]
    field: Annotated[str, Meta(description="The wrong field; empty if no single field is wrong.")]


class TooLarge(BadRequest):
    """A body is longer than any request needs; send less."""


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """A request without fields."""


def operation(method: str, path: str, **more: Any) -> Callable[[Function], Function]:
    """Declare this function as an operation; `more`: fields of Operation."""

    def state(function: Function) -> Function:
        def evaluated(name: str, default: Any) -> Any:
            annotation = function.__annotations__.get(name, default)
            return eval(annotation, function.__globals__) if isinstance(annotation, str) else annotation

        answers = evaluated("return", Any)
        answer = next((one for one in get_args(answers) if one is not Reply), answers)
        if get_origin(answers) is not UnionType:
            answer = Any if answers is Reply else answers
        made = Operation(method, path, function, evaluated("ask", Nothing), answer, **more)
        function.operation = made  # type: ignore[attr-defined]
        return function

    return state


def operations_of(*modules: ModuleType) -> list[Operation]:
    """The operations that these modules declare, in the order of their text."""
    return [
        one.operation
        for module in modules
        for one in vars(module).values()
        if isinstance(getattr(one, "operation", None), Operation)
    ]


@functools.cache
def _parts(
    ask: type[msgspec.Struct], texts: tuple[str, ...] | None
) -> tuple[type[msgspec.Struct], type[msgspec.Struct] | None]:
    """The structs of the fields that come as text, all of them for None, and as JSON."""
    as_text: list[Any] = []
    as_json: list[Any] = []
    for field in msgspec.structs.fields(ask):
        made = (field.name, field.type) if field.required else (field.name, field.type, field.default)
        (as_text if texts is None or field.name in texts else as_json).append(made)

    struct = functools.partial(msgspec.defstruct, ask.__name__, kw_only=True)
    return struct(as_text), struct(as_json, forbid_unknown_fields=True) if as_json else None


# --- reading a request ------------------------------------------------------------------------------------------------


async def asked(one: Operation, path: Mapping[str, str], query: Mapping[str, str], body: bytes) -> Any:
    """The struct `ask` of a request. Raises BadRequest. Other tasks run while a long body is decoded."""
    texts = {**(query if one.method == "GET" else {}), **path}
    try:
        found = msgspec.structs.asdict(msgspec.convert(texts, one.texts, strict=False))
    except msgspec.ValidationError as error:
        raise _refused(one.texts, {name: number_in(text) for name, text in texts.items()}, error) from None
    if one.body is not None:
        found |= await _decoded(one.body, body)
    return one.ask(**found)


async def _decoded(kind: type[msgspec.Struct], body: bytes) -> dict[str, Any]:
    """The fields in a body; no body is one without fields. A long list of `tokens` or `keys` is decoded in pieces."""
    rest, taken = body, {}
    if len(body) > MAX_REST_BYTES and (match := _LONG_LIST.search(body)):
        start, end = match.end(), body.find(b"]", match.end())
        if end - start > PIECE_BYTES:
            taken[match[1].decode()] = await _items(match[1], body, start, end)
            rest = body[:start] + body[end:]
    if len(rest) > MAX_REST_BYTES:
        says = f"body: must have at most {MAX_REST_BYTES} bytes besides its list of tokens or keys"
        raise TooLarge(says, field="body")
    text = rest or b"{}"
    try:
        found = msgspec.structs.asdict(msgspec.json.decode(text, type=kind))
    except msgspec.ValidationError as error:
        try:
            value = msgspec.json.decode(text)
        except (ValueError, RecursionError):
            value = None
        raise _refused(kind, value, error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(text, error) from None
    for name, items in taken.items():
        form = field_types(kind)[name]
        most = next((meta.max_length for meta in unwrapped(form)[1]), None)
        if found[name] or (most is not None and len(items) > most):
            raise BadRequest(
                f"{name}: {demand(form)}, found {len(items) + len(found[name] or ())}", field=name
            )
        found[name] = items
    return found


async def _items(name: bytes, body: bytes, start: int, end: int) -> list[str] | array[int]:
    """The items of the list between its brackets."""
    items: list[str] | array[int] = array("I") if name == b"tokens" else []
    while start < end:
        stop = end if end - start <= PIECE_BYTES else body.rfind(b",", start, start + PIECE_BYTES)
        try:
            piece = _LONG_ITEMS[name].decode(b"[%b]" % body[start:stop]) if stop > start else []
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            says, _, where = str(error).partition(" - at `$[")
            number = len(items) + (int(where.partition("]")[0]) if where else 0)
            field = f"{name.decode()}[{number}]"
            raise BadRequest(f"{field}: {says}", field=field) from None
        if not piece:
            field = f"{name.decode()}[{len(items)}]"
            raise BadRequest(
                f"{field}: an item is missing, or has more than {PIECE_BYTES} bytes", field=field
            )
        items.extend(piece)
        start = stop + 1
        await asyncio.sleep(0)
    return items


def keys_of(texts: Sequence[str]) -> bytes:
    """The keys that are spelled in hexadecimal. Raises BadRequest, which names the wrong item."""
    keys = []
    for index, text in enumerate(texts):
        try:
            key = bytes.fromhex(text)
        except ValueError:
            key = b""
        if len(key) != KEY_BYTES:
            what = f"keys[{index}]: must be {2 * KEY_BYTES} hexadecimal digits, found {text!r:.80}"
            raise BadRequest(what, field="keys")
        keys.append(key)
    return b"".join(keys)


def _refused(kind: type[msgspec.Struct], value: Any, error: msgspec.ValidationError) -> BadRequest:
    """The error for the first wrong field of a request, in the form of one for a wrong setting."""
    for path, says in problems(kind, value) if isinstance(value, Mapping) else ():
        return BadRequest(f"{path or 'body'}: {says}", field=path)
    return BadRequest(f"body: {error}", field="body")


def _unreadable(text: bytes, error: Exception) -> BadRequest:
    """The error for a body that is no JSON; JSON can spell lone surrogates, which no answer or log line can hold."""
    try:
        unusable = unusable_value(json.loads(text))
    except (ValueError, RecursionError):
        unusable = None
    if unusable is None:
        return BadRequest(f"body: not JSON: {error}", field="body")
    field, must, found = unusable
    return BadRequest(f"{field or 'body'}: {must}, found {found!a:.80}", field=field)


# --- what every process has; its parts have `readiness`, `page` and `log` ---------------------------------------------


class Weights(msgspec.Struct, kw_only=True):
    """The weights that a prompt is for, and whose it is."""

    model: Annotated[str, Meta(description="Model of an attached engine; empty: the only one.")] = ""
    adapter: Annotated[str, Meta(description="Name of a LoRA adapter; empty: the model itself.")] = ""
    tenant: Annotated[str, Meta(max_length=256, description="Tenant; empty: the unnamed one.")] = ""
    salt: Annotated[str, Meta(description="Salt of the requests.")] = ""

    def request(self) -> RequestIdentity:
        """The part of a prompt's identity that the request sets."""
        return RequestIdentity(adapter=self.adapter, tenant=self.tenant, salt=self.salt)


class Chunks(Weights, kw_only=True):
    """Chunks, named by a prompt's tokens or by keys."""

    tokens: Tokens | None = None
    keys: (
        Annotated[
            list[str],
            Meta(max_length=MAX_KEYS, description="Storage keys in hexadecimal, instead of tokens."),
        ]
        | None
    ) = None


class Claiming(Chunks, kw_only=True):
    """Chunks to keep in L1 until a time."""

    ttl_s: Annotated[float, Meta(gt=0, le=MAX_CLAIM_S, description="Seconds until the claim ends.")] = 3_600.0
    until_unix_s: Annotated[
        float | None, Meta(description="End of the claim, in seconds since 1970; replaces `ttl_s`.")
    ] = None
    bytes: (
        Annotated[
            int,
            Meta(gt=0, le=1 << 50, description="Maximum number of bytes to keep; a larger claim is refused."),
        ]
        | None
    ) = None

    def left_s(self, now_unix_s: float) -> float:
        """Seconds until the claim ends."""
        return self.ttl_s if self.until_unix_s is None else self.until_unix_s - now_unix_s


class LogLevel(msgspec.Struct):
    """The level of a log."""

    level: Annotated[Level, Meta(description="Lowest level that is logged.")]


@operation("GET", "/healthz", tag="probes", public=True)
def healthz(parts: Any) -> dict[str, bool]:
    """Answer, which shows that the process runs."""
    return {"ok": True}


@operation("GET", "/readyz", ctl="ready", tag="probes", public=True)
def readyz(parts: Any) -> dict[str, Any] | Reply:
    """Show whether requests are served; if not, the status is 503, and `why` gives the reason."""
    ready, why = parts.readiness()
    return Reply({"ready": ready, "why": why}, 200 if ready else 503)


@operation("GET", "/metrics", tag="metrics")
def metrics(parts: Any) -> Reply:
    """Show the metrics in Prometheus' text format, at most 0.25 s old."""
    return Reply(parts.page(), media_type=MEDIA_TYPE)


@operation("GET", "/v1/log-level", tag="log")
def log_level(parts: Any) -> LogLevel:
    """Show the log level."""
    return LogLevel(cast(Level, current_level()))


@operation("PUT", "/v1/log-level", ctl="log-level", tag="log", shows=True)
def change_log_level(parts: Any, ask: LogLevel) -> LogLevel:
    """Show or change the log level.

    The change applies to this process and its adapter hosts, until the process ends or reads its settings again at
    SIGHUP.
    """
    was, levels = current_level(), get_args(Level)
    is_quieter = levels.index(ask.level) > levels.index(was)
    if is_quieter:
        parts.log.info("log_level_changed", level=ask.level, was=was)
    set_level(ask.level)
    if not is_quieter:
        parts.log.info("log_level_changed", level=ask.level, was=was)
    return ask
