"""Lines that give way in a ledger that grows too large: detail first, then old saves, then whatever else is old."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from raystate.observe.ledger.lines import Dropped, LoggedSave, Noted, Sampled, line_of, noted_in

_WORTH = 0.9  # of the bytes at most are left, or more gives way


def thinned(lines: Sequence[bytes]) -> list[bytes]:
    """The lines of one object, fewer. Lines that can't be read here stay as they are.

    Of the samples of a worker group every second one goes. If that is not worth it, the older half of the saves goes; if that
    is not, either, so does the older half of all. One line counts what went.
    """
    kept: list[Noted] = []
    unread: list[bytes] = []
    for line in lines:
        try:
            kept.append(noted_in(line))
        except ValueError:
            unread.append(line)
    kept.sort(key=lambda one: one[:3])
    before = sum(map(len, lines))
    result = list(lines)
    for give_way in (every_second_sample, _older_saves, _older_half):
        kept = _counted(kept, give_way(kept))
        result = [*unread, *map(line_of, kept)]
        if sum(map(len, result)) <= _WORTH * before:
            break
    return result


def every_second_sample(lines: Sequence[Noted]) -> list[Noted]:
    """Of the samples of a group, but never its first or its last."""
    gone: list[Noted] = []
    samples = sorted((one for one in lines if isinstance(one.what, Sampled)), key=_group_of)
    for _, group in groupby(samples, key=_group_of):
        gone += list(group)[1:-1:2]
    return gone


def _group_of(noted: Noted) -> str:
    return noted.what.group if isinstance(noted.what, Sampled) else ""


def _older_saves(lines: Sequence[Noted]) -> list[Noted]:
    saves = [one for one in lines if isinstance(one.what, LoggedSave)]
    return saves[: len(saves) // 2]


def _older_half(lines: Sequence[Noted]) -> list[Noted]:
    return [one for one in lines if not isinstance(one.what, Dropped)][: len(lines) // 2]


def _counted(lines: Sequence[Noted], gone: Iterable[Noted]) -> list[Noted]:
    """Those that stay, with one line for those that went, now and before."""
    gone = list(gone)
    if not gone:
        return list(lines)
    past = [one for one in lines if isinstance(one.what, Dropped)]
    out = {id(one) for one in (*gone, *past)}
    saves = [one.what for one in gone if isinstance(one.what, LoggedSave)]
    sums = [one.what for one in past if isinstance(one.what, Dropped)]

    newest = max((*gone, *past), key=lambda one: one[:2])
    dropped = Dropped(
        lines=len(gone) + sum(one.lines for one in sums),
        saves=len(saves) + sum(one.saves for one in sums),
        seconds=sum(one.seconds for one in (*saves, *sums)),
        nbytes=sum(one.nbytes for one in (*saves, *sums)),
    )
    stay = [one for one in lines if id(one) not in out]
    return [*stay, newest._replace(what=dropped)]
