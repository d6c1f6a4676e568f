"""A step that `save` promised and storage never got: told in the process that was promised, and a fact of the log for all others."""

from __future__ import annotations

from typing import Any

import pytest

from raystate.core.formats.errors import StorageError
from raystate.inspection.listing import given_up
from raystate.manager.session import Session
from raystate.storage import open_storage
from tests.model.world import ModelLink, Rank, World, state

LOST = range(3, 41)  # some of them: saved while storage is out
LAST = 60


def train(rank: Rank, first: int, last: int) -> None:
    """Save each step; storage is out for those of LOST."""
    assert rank.manager is not None
    for step in range(first, last + 1):
        rank.world.storage.out = step in LOST
        rank.manager.save(step, state(step))
        rank.rest(0.5)


@pytest.mark.parametrize("asks", [True, False])
def test_who_asks_is_told_and_a_death_ends_the_promise(asks: bool) -> None:
    world = World(save_every_steps=1, keep_last=None, save_timeout_s=5.0)
    seen: list[int] = []
    world.published = seen.append
    told: list[str] = []

    def dies(rank: Rank) -> None:
        manager = rank.open("first", launched=True)
        manager.restore(state(0))
        train(rank, 1, LAST)
        if asks:
            with pytest.raises(StorageError, match="not durable") as caught:
                manager.wait_until_finished()
            told.append(str(caught.value))
        rank.rest(5.0)

    def goes_on(rank: Rank) -> None:
        manager = rank.open("second")
        restored = manager.restore(state(0))
        assert restored is not None and restored.step == LAST
        manager.close()

    with world:
        world.play(dies)
        missing = [step for step in LOST if step not in seen]
        assert len(missing) > 3, "some gave way on the devices, some in host memory"
        assert all(f"step {step}" in told[0] for step in missing if asks)
        world.play(goes_on)
        lost = given_up(open_storage(world.config.storage))
        assert lost is not None
        assert [one.step for one in lost] == missing


def test_save_makes_no_remote_call(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Due steps, steps that are not, the newest once more, with and without force; storage is out, and back. The end is judged by the
    newest step, which is durable: what storage never got is one warning."""
    calls: dict[int, int] = {}
    for owner, name in ((ModelLink, "ask"), (Session, "call_host")):
        real = getattr(owner, name)

        def counted(self: Any, *args: Any, _real: Any = real, **more: Any) -> Any:
            rank = getattr(self.rank, "number", self.rank)
            calls[rank] = calls.get(rank, 0) + 1
            return _real(self, *args, **more)

        monkeypatch.setattr(owner, name, counted)
    world = World(ranks=2, nodes=2, save_every_steps=3)

    def script(rank: Rank) -> None:
        manager = rank.begin(state(0))
        manager.save(1, state(1))  # takes the slots
        rank.rest(1.0)
        before = calls[rank.number]
        for step in range(2, 30):
            rank.world.storage.out = step in range(10, 20)
            manager.save(step, state(step), force=step % 7 == 0)
            manager.save(step, state(step), force=step % 2 == 0)
            rank.rest(0.5)
        assert calls[rank.number] == before
        rank.rest(10.0)
        manager.close()

    world.play_all(script)
    [told] = [text for text in caplog.messages if "although save() had said True" in text]
    assert "ends well, with step 29" in told and "step 12: the snapshot" in told
