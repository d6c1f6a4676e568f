"""Which snapshots are stable or dead, and what that does to the interval."""

from __future__ import annotations

import dataclasses

from raystate.core.formats.messages import (
    Advice,
)
from raystate.core.host.slots import why_reusable
from tests.core.driver import Driver, running


def test_stable_when_all_ranks_hold_it():
    driver = running()
    driver.hold(0, 1)
    assert driver.core.snapshots.stable == -1
    driver.hold(1, 1)
    assert driver.advice().stable == 1


def test_other_layout_is_not_complete():
    driver = running()
    driver.hold(0, 1)
    driver.hold(1, 1, layout="M")
    assert driver.core.snapshots.stable == -1


def test_skipped_step_is_dead_and_the_interval_grows_and_shrinks():
    driver = running()
    driver.hold(0, 1)
    driver.word(1, 1, pending=(1,))
    assert driver.core.snapshots.dead == set()
    driver.word(1, 1)
    assert driver.advice().dead == (1,)
    assert driver.advice().interval == 1, "one skip is a hiccup"
    driver.stage(2)
    driver.hold(0, 3)
    driver.word(1, 3)
    assert driver.advice().dead == (3,)
    assert driver.advice().interval == 2
    for step in range(4, 40, 2):
        driver.stage(step)
    assert driver.advice().interval == 1


def test_what_two_ranks_of_one_host_have_reported_together_is_judged_for_all():
    """Seed 2937: the second one's piece made the first one's look old, nobody saw that a rank elsewhere had skipped it, and its slots were
    full for ever."""
    driver = Driver()
    driver.join(["a", "a", "b"])
    driver.restore()
    driver.stage(1)
    driver.word(2, 3)  # rank 2 has skipped step 2
    driver.auto = False
    for rank in (0, 1):
        driver.staged["a"].append(dataclasses.replace(driver.staged["a"][rank], step=2))
        driver.word(rank, 3, report=False)
    driver.report("a")
    assert driver.core.snapshots.dead == {2}


def test_newer_reports_only():
    driver = running()
    driver.hold(0, 1)
    driver.seq["a"] = 1
    driver.staged["a"] = []
    driver.report("a")  # an old number: a late message
    driver.seq["a"] = 1000
    driver.staged["b"] = []
    driver.hold(1, 1)
    assert driver.core.snapshots.stable == 1


def test_advice_that_was_lost_is_given_again():
    """Schedule 3701: the first advice to a HostActor that had started anew was lost, and its trainers got no slots for ever."""
    driver = running()
    driver.auto = False
    del driver.advised["a"]  # it has got none so far
    driver.report("a")
    driver.out.clear()
    driver.tick(2.0)
    driver.report("b")
    assert driver.take(Advice) == []
    driver.report("a")
    assert [one.host for one in driver.take(Advice)] == ["a"]


def test_a_promised_piece_of_a_skipped_step_is_kept_until_no_rank_can_get_the_step_by_force():
    """The simulator's seed 484: it was kept for ever, all slots were such pieces, and no rank came any further."""
    driver = running()
    driver.hold(0, 2)
    driver.word(1, 2)
    assert (driver.advice().dead, driver.advice().lost) == ((2,), ())
    driver.staged["a"].clear()
    driver.hold(0, 2, promised=True)
    mine = driver.staged["a"][0]
    assert driver.advice().lost == () and why_reusable(mine, driver.advice()) is None
    driver.word(1, 3)
    assert driver.advice().lost == (2,) and why_reusable(mine, driver.advice()) is not None
