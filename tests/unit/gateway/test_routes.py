"""What the gateway reads of bodies and paths."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.gateway.errors import Failure
from kvstrata.gateway.request import request_id
from kvstrata.gateway.routes import RESPONSES, ROUTES, BodyFields, parse_body, parse_body_start
from tests.harness.amount import amount

CHAT = "/v1/chat/completions"
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
BODIES = st.dictionaries(
    st.sampled_from(
        ("model", "user", "prompt_cache_key", "previous_response_id", "store", "messages", "stream")
    )
    | st.text(max_size=8),
    JSON,
)


@given(BODIES)
@settings(max_examples=amount(40, 100))
def test_what_is_read_is_what_json_says(body: dict[str, Any]) -> None:
    read = parse_body(CHAT, ROUTES[CHAT], json.dumps(body).encode())
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        assert isinstance(read, Failure) and (read.status, read.param) == (400, "model")
        return
    assert isinstance(read, BodyFields)
    assert read.model == (model or "")
    words = [body.get(name) for name in ("prompt_cache_key", "user")]
    assert read.session == next((word for word in words if isinstance(word, str) and word), "")
    assert read.repeatable


@given(st.binary(max_size=200))
def test_any_bytes_get_an_answer(body: bytes) -> None:
    for path in (CHAT, RESPONSES, "/v1/audio/transcriptions"):
        read = parse_body(path, ROUTES[path], body)
        assert isinstance(read, BodyFields) or (read.status == 400 and read.message)


@given(st.integers(0, 400), st.booleans())
def test_a_body_that_is_cut_tells_its_model_or_is_refused_where_that_matters(cut: int, several: bool) -> None:
    body = json.dumps({"stream": True, "messages": [{"content": "x" * 200}], "model": "m"}).encode()[:cut]
    found = parse_body_start(CHAT, ROUTES[CHAT], body, several=several)
    if b'"model": "m"' in body or not several:
        assert isinstance(found, BodyFields)
        assert found.model == ("m" if b'"model": "m"' in body else "")
        assert found.streams == (b"true" in body) and found.text == body.partition(b'"messages": ')[2]
    else:
        assert isinstance(found, Failure) and (found.status, found.param) == (413, "model")


@given(st.text(st.characters(codec="latin-1", exclude_characters="\r\n\0"), max_size=300))
@settings(max_examples=amount(30, 100))
def test_a_forms_model_is_found(value: str) -> None:
    text = value.encode()
    part = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n%s\r\n%b\r\n'
    form = part % (b"file", b"Content-Type: audio/wav\r\n", b'name="model"\r\n\0') + part % (
        b"model",
        b"",
        text,
    )
    read = parse_body("/v1/audio/transcriptions", ROUTES["/v1/audio/transcriptions"], form + b"--b--\r\n")
    assert isinstance(read, BodyFields) and read.model == value


@given(st.binary(max_size=300))
def test_an_id_of_a_request_fits_into_a_header_and_a_line(given_id: bytes) -> None:
    word = request_id(given_id)
    assert 0 < len(word) <= 128 and word.isascii() and word.isprintable()
    if 0 < len(given_id) <= 128 and given_id.isascii() and given_id.decode().isprintable():
        assert word == given_id.decode()


def test_a_request_names_its_tenant_as_it_does_for_the_connector() -> None:
    for params, tenant in (
        ({"kvstrata.tenant": "blue"}, "blue"),
        ({"kvstrata.tenant": "x" * 300}, "x" * 257),
        ({"kvstrata.tenant": 7}, ""),
        ({"tenant": "blue"}, ""),
        (["kvstrata.tenant"], ""),
        (None, ""),
        (7, ""),
    ):
        body = {"model": "m", "prompt": "p", "kv_transfer_params": params}
        found = parse_body("/v1/completions", ROUTES["/v1/completions"], json.dumps(body).encode())
        plain = parse_body("/v1/completions", ROUTES["/v1/completions"], b'{"model": "m", "prompt": "p"}')
        assert isinstance(found, BodyFields) and isinstance(plain, BodyFields)
        assert found.kv_tenant == tenant
        assert (found.context == plain.context) == (not tenant)


def test_a_hostile_form_is_read_in_one_pass() -> None:
    """Whose reading took hours while lines were tried again from each one on."""
    field = b"content-disposition:;name=model\r\n"
    route = ROUTES["/v1/audio/transcriptions"]
    for form in (
        b"--b\r\n" + field * 60_000,
        field * 60_000,
        b"--b\r\n" + b"content-disposition:;" * 100_000 + b"\r\n\r\nx\r\n--b--\r\n",
        b"--b\r\n" + b"\r\n\r\n\r\n--b" * 200_000,
        b"-" * 2_000_000,
        b"--\r\n" * 500_000,
    ):
        assert parse_body("/v1/audio/transcriptions", route, form) == BodyFields()
