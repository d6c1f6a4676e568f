"""Which hosts keep copies of which other hosts' snapshots: a pure function of who is there and of what was agreed before."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

from raystate.core.formats.names import HostId

Peers = dict[HostId, tuple[HostId, ...]]
"""host -> the hosts that keep copies of what it holds."""


def assign_peers(
    domains: Mapping[HostId, str],
    replicas: int,
    before: Mapping[HostId, Sequence[HostId]] | None = None,
    leaving: Collection[HostId] = (),
) -> Peers:
    """Give each host the peers that keep copies of its snapshots.

    The first peer is in another failure domain if there is one, so no domain ever has all copies. Within that, the numbers of hosts
    that one peer copies for are as equal as they can be: within one of each other, unless one domain has more than half of all hosts.
    Of the peers that were agreed `before`, all stay that can. A host that goes away is a peer only of one beside which no other stays.
    (test_simulator.test_planted_bug_of_peer_copies_is_found, "copies in one failure domain")

    Args:
        domains: host -> its failure domain: the hosts of one domain are lost together.
        replicas: copies of each host's snapshots; as many as there are other hosts, if these are fewer.
        before: an earlier answer; hosts that are gone may be in it.
        leaving: hosts that are announced to go away.
    """
    seats = _Seats(domains, replicas, leaving)
    seats.keep(before or {})
    seats.fill()
    seats.balance()
    return seats.peers()


class _Seats:
    """Each host has `replicas` seats to fill with peers, or fewer if there are fewer. The first seat of a host needs a peer in another
    domain, if one there is able."""

    def __init__(self, domains: Mapping[HostId, str], replicas: int, leaving: Collection[HostId]):
        self._domains = domains
        self._hosts = sorted(domains, key=lambda host: (domains[host], host))
        every = frozenset(domains)
        self._staying = every.difference(leaving) or every
        self._able = {
            host: every if self._staying == frozenset({host}) else self._staying for host in self._hosts
        }  # to be peers of each
        in_domains = {able: {domains[one] for one in able} for able in (every, self._staying)}
        self._elsewhere = {host: bool(in_domains[able] - {domains[host]}) for host, able in self._able.items()}
        seats = {host: max(0, min(replicas, len(able) - (host in able))) for host, able in self._able.items()}
        self._peers: dict[HostId, list[HostId | None]] = {host: [None] * count for host, count in seats.items()}
        self._copied: dict[HostId, list[tuple[HostId, int]]] = {host: [] for host in self._hosts}  # peer -> seats that it fills

    def peers(self) -> Peers:
        return {host: tuple(peer for peer in self._peers[host] if peer is not None) for host in self._hosts}

    def _may(self, owner: HostId, seat: int, peer: HostId) -> bool:
        if peer == owner or peer in self._peers[owner] or peer not in self._able[owner]:
            return False
        return seat > 0 or not self._elsewhere[owner] or self._domains[peer] != self._domains[owner]

    def _sit(self, owner: HostId, seat: int, peer: HostId) -> None:
        old = self._peers[owner][seat]
        if old is not None:
            self._copied[old].remove((owner, seat))
        self._peers[owner][seat] = peer
        self._copied[peer].append((owner, seat))

    def keep(self, before: Mapping[HostId, Sequence[HostId]]) -> None:
        for owner in self._hosts:
            left = [peer for peer in before.get(owner, ()) if peer in self._domains]
            for seat in range(len(self._peers[owner])):  # the first seat first: only some may have it
                peer = next((one for one in left if self._may(owner, seat, one)), None)
                if peer is not None:
                    self._sit(owner, seat, peer)
                    left.remove(peer)

    def fill(self) -> None:
        """Empty seats get the peer that has least to do; of equals the next one in order."""
        count = len(self._hosts)
        for seat in range(max(map(len, self._peers.values()), default=0)):
            for number, owner in enumerate(self._hosts):
                if self._peers[owner][seat : seat + 1] == [None]:
                    others = (self._hosts[(number + turn) % count] for turn in range(1, count))
                    able = [peer for peer in others if self._may(owner, seat, peer)]
                    self._sit(owner, seat, min(able, key=lambda peer: len(self._copied[peer])))

    def balance(self) -> None:
        """Move seats along the shortest chains that end at a peer with at least two less to do, until there is none."""
        while self._hosts:
            by_load = sorted(filter(self._staying.__contains__, self._hosts), key=lambda host: -len(self._copied[host]))
            least = len(self._copied[by_load[-1]])
            busy = [host for host in by_load if len(self._copied[host]) >= least + 2]
            if not any(self._relieve(host) for host in busy):
                return

    def _relieve(self, busy: HostId) -> bool:
        came: dict[HostId, tuple[HostId, HostId, int] | None] = {busy: None}  # peer -> (from which peer, whose seat)
        queue = deque([busy])
        limit = len(self._copied[busy]) - 2
        while queue:
            peer = queue.popleft()
            for owner, seat in self._copied[peer]:
                for other in self._hosts:
                    if other in came or not self._may(owner, seat, other):
                        continue
                    came[other] = (peer, owner, seat)
                    if len(self._copied[other]) <= limit:
                        self._move(came, other)
                        return True
                    queue.append(other)
        return False

    def _move(self, came: Mapping[HostId, tuple[HostId, HostId, int] | None], last: HostId) -> None:
        while (step := came[last]) is not None:
            peer, owner, seat = step
            self._sit(owner, seat, last)
            last = peer
