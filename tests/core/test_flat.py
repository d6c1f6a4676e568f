"""What a Coordinator remembers of each durable save, and of each question, is forgotten in time."""

from __future__ import annotations

import gc

from tests.core.driver import running


def test_a_thousand_durable_saves_more_leave_nothing_in_the_coordinator():
    driver = running(keep_last=1)

    def save(first: int, last: int) -> int:
        for step in range(first, last):
            driver.flush(0, driver.key(step - 1))
            driver.stage(step, promised=True)
            driver.commit()
            driver.out.clear()
            for slots in driver.staged.values():
                slots.clear()
        gc.collect()
        return len(gc.get_objects())

    before = save(1, 1200)
    assert save(1200, 2200) - before < 50
