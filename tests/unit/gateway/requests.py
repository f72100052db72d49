"""Requests as the gateway knows them."""

from __future__ import annotations

from typing import Any

from kvstrata.config.gateway_model import GatewayTenantSettings
from kvstrata.gateway.choosing import ChoiceInputs
from kvstrata.gateway.door import Tenant
from kvstrata.gateway.request import Head, Request
from kvstrata.gateway.routes import BodyFields


def a_request(
    arrived_s: float = 0.0,
    tenant: str = "",
    tokens: int = 0,
    number: int = 0,
    weight: float = 1.0,
    **more: Any,
) -> Request:
    """A request of so many tokens, 0: it was not read; `more`: of what is wanted."""
    request = Request(Head("POST", "/v1/completions", {}, str(number)), arrived_s)
    if tenant:
        settings = GatewayTenantSettings(name=tenant, key_file="k", weight=weight)
        request.tenant = Tenant(settings, arrived_s)
    if tokens:
        wanted = ChoiceInputs(
            **{"word": str(number), "number": number, "model": "m", "tokens": tokens, **more}
        )
        request.wanted, request.asked, request.body_bytes = wanted, BodyFields(wanted.model), 4 * tokens
    return request
