"""Parses a complete request, and derives the inputs for the choice of its engine."""

from __future__ import annotations

import collections
import itertools
import secrets
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvstrata.config.gateway_model import GatewaySettings, SloSettings
from kvstrata.gateway.choosing import ChoiceInputs
from kvstrata.gateway.door import Headers, Tenant
from kvstrata.gateway.errors import Failure
from kvstrata.gateway.fleet import Fleet
from kvstrata.gateway.handover.legs import SAME_BODY
from kvstrata.gateway.prefixes import TOKEN_BYTES, keys_of
from kvstrata.gateway.residency.prompt import Prompt
from kvstrata.gateway.routes import (
    MAX_SESSION_CHARS,
    RESPONSES,
    ROUTES,
    BodyFields,
    any_engine_answers,
    ids_in,
    parse_body,
    parse_body_start,
    response_of,
)

if TYPE_CHECKING:
    from kvstrata.gateway.request import Request

SESSIONS, SLO_CLASS, PRIORITY = (b"x-session-id", b"session_id"), b"x-slo-class", b"x-priority"
"""Headers that name a request's session (the second is Codex's), class of service and priority."""
MAX_RESPONSES = 1 << 16
"""Maximum number of stored responses whose engine is remembered; the oldest are forgotten first."""


class Reader:
    """Belongs to the event loop."""

    def __init__(self, settings: GatewaySettings, fleet: Fleet) -> None:
        self.settings = settings
        self._fleet = fleet
        self.secret = secrets.token_bytes(32)
        """Secret for the keys of a prompt's pieces (prefixes.py); shared by gateways that share."""
        self._numbers = itertools.count()
        self._made_by: collections.OrderedDict[str, tuple[str, str]] = collections.OrderedDict()
        """Engine and tenant of each stored response, by the response's id, which the engine has drawn at random."""

    def read(
        self, request: Request, body: bytes, slo: SloSettings | None, *, cut: bool
    ) -> ChoiceInputs | Failure:
        """Parse a request's body into `request.asked`, and return the inputs for the choice of its engine.

        `slo`: its class of service. `cut`: `body` is only the first part of a longer body.
        """
        (_, path, headers, word, _), route, tenant = request.head, request.route, request.tenant
        assert route is not None
        kv_tenant = tenant.settings.kv_tenant if tenant is not None else ""
        response = response_of(path) if path not in ROUTES else ""
        if response or any_engine_answers(path):
            found: BodyFields | Failure = BodyFields(repeatable=route.repeatable)
        elif cut:
            found = parse_body_start(path, route, body, several=self._fleet.several())
        else:
            found = parse_body(path, route, body)
        if isinstance(found, Failure):
            return found
        if kv_tenant and route.computes and not (route.salted or route.multipart):
            says = f"{path}: engines do not keep the KV of tenants apart there; use another path"
            return Failure(400, "path_not_allowed", says)
        if kv_tenant and route.salted:
            if found.adds:
                says = (
                    f"{found.adds}: the gateway sets this field for the tenants of its settings; leave it out"
                )
                return Failure(400, "field_not_allowed", says, found.adds)
            found = found._replace(kv_tenant=kv_tenant, salt=kv_tenant)
        request.asked = found
        if not found.model and path in ROUTES and not response and self._fleet.several():
            says = "model: engines here serve several models; name one of /v1/models"
            return Failure(400, "model_missing", says, "model")
        after = response or found.after_response
        maker, owner = self._made_by.get(after, ("", ""))
        if after and tenant is not None and owner != tenant.name:
            says = f"no stored response of yours has the id {after!a:.200}"
            return Failure(404, "response_not_found", says, "" if response else "previous_response_id")
        if not self._may_have(request, found.response_id):
            says = "request_id: somebody else has a response of this id; leave it out"
            return Failure(400, "id_taken", says, "request_id")
        given = next((headers[name] for name in SESSIONS if headers.get(name)), b"").decode("latin-1")
        prompt = ids_in(found.text) if self.settings.predicts else None
        return ChoiceInputs(
            word=word,
            number=next(self._numbers),
            model=found.model,
            tokens=max(1, len(prompt) if prompt is not None else len(found.text) // TOKEN_BYTES),
            session=given[:MAX_SESSION_CHARS] or found.session,
            made_by=maker,
            keys=self._keys(found, prompt, request.sender),
            prompt=self._prompt(found, prompt),
            streams=found.streams,
            slo=slo,
            arrived_s=request.arrived_s,
            contract=self.settings.split if found.splits and (prompt or path in SAME_BODY) else "",
        )

    def with_ids(self, found: BodyFields, wanted: ChoiceInputs, ids: array[int] | None) -> ChoiceInputs:
        """`wanted` with the token ids of its text prompt; unchanged if `ids` is None (unknown) or empty."""
        if not ids:
            return wanted
        contract = self.settings.split if found.splits else ""
        return wanted._replace(tokens=len(ids), prompt=self._prompt(found, ids), contract=contract)

    def slo_of(self, headers: Headers, tenant: Tenant | None, known: Iterable[str]) -> str:
        """The class of service of a request: its header's if that is in `known`, else its tenant's; empty: none."""
        given = headers.get(SLO_CLASS, b"").decode("latin-1")
        if given in known:
            return given
        return tenant.settings.slo if tenant is not None else ""

    def priority_of(self, headers: Headers, tenant: Tenant | None) -> int:
        """A request's priority within its tenant, at most the tenant's `max_priority`."""
        given = headers.get(PRIORITY, b"")
        most = tenant.settings.max_priority if tenant is not None else 0
        return min(most, int(given)) if given.isdigit() and len(given) <= 9 else 0

    def answered(self, request: Request, response: str) -> None:
        """Remember the engine and the tenant of a response that an answer names as stored.

        Answers on other paths do not count, since clients can make an engine write any id there, nor does the id of
        another tenant's response.
        """
        if not (
            request.engine and request.head.path.startswith(RESPONSES) and self._may_have(request, response)
        ):
            return
        self._made_by[response] = request.engine, request.sender
        self._made_by.move_to_end(response)
        if len(self._made_by) > MAX_RESPONSES:
            self._made_by.popitem(last=False)

    def _may_have(self, request: Request, response: str) -> bool:
        """Whether no other tenant has a response of this id."""
        return self._made_by.get(response, ("", request.sender))[1] == request.sender

    def _keys(self, found: BodyFields, prompt: array[int] | None, tenant: str) -> list[bytes]:
        """The keys of the prompt's pieces; empty if the policy does not use them."""
        if not self.settings.predicts or not found.text:
            return []
        context = self._fleet.root(found.model).encode(), tenant.encode(), found.context
        return keys_of(context, found.text if prompt is None else prompt.tobytes(), self.secret)

    def _prompt(self, found: BodyFields, prompt: array[int] | None) -> Prompt | None:
        if prompt is None:
            return None
        tenant = found.kv_tenant if found.kv_tenant != self.settings.controllers.tenant else ""
        return Prompt(prompt, adapter=self._fleet.adapter(found.model), salt=found.salt, tenant=tenant)
