"""The counts of a HostActor, in its reports."""

from __future__ import annotations

from pathlib import Path

from raystate.core.formats.commands import Write
from raystate.core.formats.messages import HostReported
from raystate.core.formats.names import SaveId
from raystate.machine.counts import counts
from raystate.observe.counted import requests_in
from tests.arena.test_copying import LINE, A, Pair
from tests.cluster.training import wait_for
from tests.patience import PATIENCE_S


def test_the_first_report_after_a_save_tells_of_its_requests(tmp_path: Path) -> None:
    """A run may end with it: what waits for its turn would never be told."""
    pair = Pair(tmp_path)

    def reports(since: int = 0) -> list[dict[str, float]]:
        pair.a.loop.turn()
        return [requests_in(one.summary.counts) for one in pair.a.told[since:] if isinstance(one, HostReported)]

    try:
        pair.stage(1)
        wait_for(lambda: any(reports()), "a report with counts")
        before, told = max(one.get("write", 0.0) for one in reports()), len(pair.a.told)
        counts.request("create")  # as if by the save, which comes to nothing
        save = pair.a.loop.write(Write(host=A, save=SaveId("a1k1"), lineage=LINE, step=1, ranks=(0,)))
        assert save.exception(PATIENCE_S) is not None
        wait_for(lambda: reports(told), "a report")
        assert reports(told)[0].get("write", 0.0) > before
    finally:
        pair.close()
