"""Records the public key to which each instance id belongs.  No I/O, no clock.

1. An id belongs to the key under which it was first registered, even while its instance is absent and after a restart
   of the controller: the keys are kept with the orders of admins (orders.py), until an admin removes the instance.
2. If the controller's key file lists ids for its clients (`client KEY ID…`), a client may register only under its own
   ids; if several clients' ids match, the closest match counts.  A key that the file no longer lists owns no id, so a
   client's key can be changed in the file.
3. At most MAX_KEYS ids are kept.  At that limit, ids that were not used for KEPT_S are replaced; if none is so old, new
   ids are refused, since otherwise a flood of new ids would free the ids of absent instances.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from kvstrata.controller.orders import KeyOfId, Orders
from kvstrata.errors import NotPermitted, Refused, WrongKey
from kvstrata.observability.logging import EventLog

MAX_KEYS = 4_096
KEPT_S = 7 * 86_400
SEEN_AGAIN_S = 86_400
"""Minimum time between two updates of the time at which an id was last seen."""

Listed = Mapping[str, tuple[str, ...]]
"""The clients of the controller's key file: public key → ids that it may use (`NAME`, or `NAME-*`); empty: any."""


class InstanceKeys:
    """Decides whether a client may register under an id. Belongs to the event loop."""

    def __init__(
        self, orders: Orders, unix_s: Callable[[], float], listed: Callable[[], Listed | None]
    ) -> None:
        """`listed()` is None for a controller without a key file, to which every client may connect."""
        self._orders = orders
        self._unix_s = unix_s
        self._listed = listed
        self._log = EventLog("members")

    def check(self, instance: str, key: str, host: str) -> None:
        """Raise WrongKey or NotPermitted unless this key may register under this id; `host` is for the log."""
        if not self._may(key, instance):
            self._tell(instance, host, "the key file lists other ids for its key")
            raise NotPermitted(
                f"instance: the controller's key file does not list {instance} for the key of this connection; name "
                "the instance as listed there (--instance-id), or list this id after `client KEY`",
                field="instance",
            )
        if self._owner(instance) not in ("", key):
            self._tell(instance, host, "the id belongs to another key")
            raise WrongKey(
                f"instance: {instance} belongs to the key of another instance, which registered first; give this "
                "instance its own name (--instance-id), or, if it replaces the other one, release the id: "
                f"`kvstrata ctl cluster remove {instance}`",
                field="instance",
            )

    def check_name(self, name: str, key: str) -> None:
        """Raise NotPermitted unless the key file allows a gateway with this key to use this name."""
        if not self._may(key, name):
            raise NotPermitted(
                f"gateway: the controller's key file does not list {name} for the key of this connection; set "
                "controllers.name of the gateway to a name that is listed there, or list this one after `client KEY`",
                field="gateway",
            )

    def learn(self, instance: str, key: str, is_member: Callable[[str], bool]) -> None:
        """Record that this id belongs to this key, which `check` has accepted. Raises Refused."""
        known, now_s = self._orders.keys.get(instance), int(self._unix_s())
        if known is not None and known.key == key and now_s - known.seen_unix_s < SEEN_AGAIN_S:
            return
        if known is None and len(self._orders.keys) >= MAX_KEYS:
            self._make_room(now_s, is_member)
        self._orders.learn_key(instance, KeyOfId(key, now_s))

    def seen(self, instance: str) -> None:
        """Update the time at which an instance was last a member to now."""
        known, now_s = self._orders.keys.get(instance), int(self._unix_s())
        if known is not None and now_s - known.seen_unix_s >= SEEN_AGAIN_S:
            self._orders.learn_key(instance, KeyOfId(known.key, now_s))

    def forget(self, instance: str) -> None:
        """Remove the id's key."""
        self._orders.learn_key(instance, None)

    def fits(self, instance: str, key: str) -> bool:
        """Whether a member with this id and key may remain a member."""
        return self._owner(instance) in ("", key)

    def _owner(self, instance: str) -> str:
        """The key that the id belongs to; empty: none."""
        known = self._orders.keys.get(instance)
        return known.key if known is not None and self._may(known.key, instance) else ""

    def _may(self, key: str, instance: str) -> bool:
        """Whether the key file allows this key to use this id."""
        listed = self._listed()
        if listed is None:
            return True
        ours = _fit(listed.get(key), instance)
        return ours > 0 and ours >= max(_fit(ids, instance) for ids in listed.values())

    def _make_room(self, now_s: int, is_member: Callable[[str], bool]) -> None:
        old = [
            (known.seen_unix_s, instance)
            for instance, known in self._orders.keys.items()
            if now_s - known.seen_unix_s >= KEPT_S and not is_member(instance)
        ]
        if not old:
            raise Refused(
                f"instance: {MAX_KEYS} ids are known, all seen within {KEPT_S // 86_400} days; reuse ids, or "
                "release some with `kvstrata ctl cluster remove ID`",
                field="instance",
            )
        self.forget(min(old)[1])

    def _tell(self, instance: str, host: str, why: str) -> None:
        # One log key for all ids, since senders choose the ids.
        self._log.repeated(
            logging.WARNING, f"refused: {why}", "registration_refused", instance=instance, host=host, why=why
        )


def _fit(ids: tuple[str, ...] | None, instance: str) -> int:
    """How closely listed ids match this one; 0: not at all. The client with the closest match may use the id."""
    if not ids:
        return 0 if ids is None else 1
    exact = [2 * len(one) for one in ids if one == instance]
    prefixes = [len(one) for one in ids if one.endswith("-*") and instance.startswith(one[:-1])]
    return max((*exact, *prefixes), default=0)
