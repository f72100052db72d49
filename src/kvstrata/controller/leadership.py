"""Decides whether this controller may send commands: it is the only one, or it won the election (election.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata.controller.history import Journal
from kvstrata.controller.member import Member
from kvstrata.errors import NotLeading

if TYPE_CHECKING:  # importing it needs the client library of etcd
    from kvstrata.controller.election import Election


class Leadership:
    """The leadership of one controller."""

    def __init__(self, election: Election | None, journal: Journal, *, retry_after_s: float) -> None:
        """`election`: None for the only controller; `retry_after_s`: for callers that are refused."""
        self.election = election
        self._journal = journal
        self._retry_after_s = retry_after_s

    @property
    def token(self) -> int | None:
        """The token that commands carry: 0 for the only controller, None for a controller that does not lead."""
        return 0 if self.election is None else self.election.token or None

    @property
    def proof(self) -> tuple[int, int]:
        """Token and cluster id for answers to heartbeats; zeros for the only controller, and without the lead."""
        election, token = self.election, self.token
        return (token, election.cluster_id) if election is not None and token else (0, 0)

    def must_lead(self) -> None:
        """Raise NotLeading unless this controller may send commands."""
        if self.token is None:
            assert self.election is not None
            who, leader = "there is no leader now", self.election.leader
            if leader is not None:
                who = f"ask {leader.member.name} at {leader.member.http_url}"
            raise NotLeading(f"this controller is not the leader; {who}", retry_after_s=self._retry_after_s)

    def changed(self) -> None:
        """Record a change of the leader as an event."""
        assert self.election is not None
        leader = self.election.leader
        self._journal.say(
            "leadership", leader=leader.member.name if leader else "", leads=self.token is not None
        )

    def check_obeys(self, member: Member, obeys: tuple[int, int]) -> None:
        """React to an instance that has seen a greater (cluster id, token) than ours, and so refuses our commands."""
        election = self.election
        if election is None:
            if obeys[1] and member.obeys != obeys:
                self._journal.say(
                    "obeys_others",
                    member.id,
                    reason="it has followed controllers that share an etcd, and refuses commands of a controller "
                    "without etcd; restart the instance, or give this controller --etcd",
                )
        elif election.token and obeys > (election.cluster_id, election.token):
            election.outbid(obeys[0])
        member.obeys = obeys
