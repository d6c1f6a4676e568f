"""Who keeps copies for whom: properties of the placement, over many clusters."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from raystate.core.coordinator.peers import Peers, assign_peers
from raystate.core.formats.names import HostId

CLUSTERS = 300


def cluster(random: Random) -> dict[HostId, str]:
    """Hosts in failure domains of any sizes."""
    domains = random.choice((1, 2, 2, 3, 4, 40))
    return {HostId(f"h{random.randrange(10**6):06}"): f"d{random.randrange(domains)}" for _ in range(random.randint(1, 24))}


def loads(domains: dict[HostId, str], peers: Peers) -> Counter[HostId]:
    found: Counter[HostId] = Counter(dict.fromkeys(domains, 0))
    found.update(peer for mine in peers.values() for peer in mine)
    return found


def largest(domains: dict[HostId, str]) -> int:
    return max(Counter(domains.values()).values())


def history(random: Random) -> tuple[dict[HostId, str], Peers, int]:
    """A cluster in which hosts have come and gone."""
    domains, replicas = cluster(random), random.choice((1, 1, 1, 2, 3))
    peers = assign_peers(domains, replicas)
    for _ in range(random.randint(0, 6)):
        if len(domains) > 2 and random.random() < 0.5:
            del domains[random.choice(sorted(domains))]
        else:
            domains[HostId(f"h{random.randrange(10**6):06}")] = f"d{random.randrange(3)}"
        peers = assign_peers(domains, replicas, peers)
    return domains, peers, replicas


@pytest.mark.parametrize("seed", range(CLUSTERS))
def test_no_domain_has_all_copies(seed: int):
    domains, peers, replicas = history(Random(seed))
    assert set(peers) == set(domains)
    for host, mine in peers.items():
        assert len(set(mine)) == len(mine) == min(replicas, len(domains) - 1)
        assert host not in mine
        if len(set(domains.values())) > 1:
            assert len({domains[one] for one in (host, *mine)}) > 1


@pytest.mark.parametrize("seed", range(CLUSTERS))
def test_loads_are_within_one_of_each_other(seed: int):
    domains, peers, replicas = history(Random(seed))
    found = loads(domains, peers)
    if 2 * largest(domains) <= len(domains) or len(set(domains.values())) == 1:
        assert max(found.values()) - min(found.values()) <= 1
    elif replicas == 1:
        # The hosts of the large domain can go to the others only: each of these as often as the next.
        large = max(Counter(domains.values()), key=lambda one: Counter(domains.values())[one])
        others = [found[host] for host in domains if domains[host] != large]
        assert max(others) - min(others) <= 1


@pytest.mark.parametrize("seed", range(CLUSTERS))
def test_what_can_stay_stays_when_a_host_comes_or_goes(seed: int):
    random = Random(seed)
    domains = {HostId(f"h{number:02}"): f"d{number % random.choice((3, 4, 20))}" for number in range(random.randint(6, 20))}
    replicas = random.choice((1, 2))
    peers = assign_peers(domains, replicas)
    assert assign_peers(domains, replicas, peers) == peers
    after = dict(domains)
    if random.random() < 0.5:
        gone = random.choice(sorted(domains))
        del after[gone]
    else:
        after[HostId("new")] = f"d{random.randrange(3)}"
    then = assign_peers(after, replicas, peers)
    moved = sum(1 for host in set(domains) & set(after) for peer in peers[host] if peer in after and peer not in then[host])
    assert moved <= 2 * replicas  # the new one gets its part, or what the lost one had copied is shared out


@pytest.mark.parametrize("seed", range(CLUSTERS))
def test_hosts_that_go_away_are_peers_of_none_beside_which_another_stays(seed: int):
    random = Random(seed)
    domains, before, replicas = history(random)
    leaving = {host for host in domains if random.random() < random.choice((0.2, 0.9))}
    peers = assign_peers(domains, replicas, before, leaving)
    staying = domains.keys() - leaving or domains.keys()
    for host, mine in peers.items():
        able = staying - {host} or domains.keys() - {host}
        assert set(mine) <= able
        assert len(set(mine)) == len(mine) == min(replicas, len(able))
        if any(domains[one] != domains[host] for one in able):
            assert any(domains[one] != domains[host] for one in mine)


def test_small_clusters():
    a, b = HostId("a"), HostId("b")
    assert assign_peers({}, 1) == {}
    assert assign_peers({a: "a"}, 1) == {a: ()}
    assert assign_peers({a: "x", b: "x"}, 1) == {a: (b,), b: (a,)}
    assert assign_peers({a: "x", b: "y"}, 0) == {a: (), b: ()}


def test_a_large_cluster_is_placed_at_once():
    domains = {HostId(f"h{number:04}"): f"slice{number // 16}" for number in range(512)}
    peers = assign_peers(domains, 1)
    assert set(loads(domains, peers).values()) == {1}
