"""A link in the place of anything in a run's folder: nothing outside the run is changed, whatever is done to the run then."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import raystate
from raystate.compilation import ProgramStore, Shelf
from raystate.compilation.store import program_name
from raystate.core.formats.errors import RaystateError
from raystate.core.formats.tree import Package
from raystate.inspection.verification import verify_log, verify_step
from raystate.storage import (
    RunLog,
    StepFolder,
    assume_dead,
    collect_garbage,
    open_storage,
    visible_steps,
)
from raystate.storage.names import ASIDE, BASES, COMPILED, DEAD, LOG, PACKAGES, STATE, TRASH, WORK, log_name
from raystate.transfer.removing import remove_run, remove_step
from tests.compilation.nodes import CAP, HOST
from tests.damage.damages import FIRST
from tests.storage.attempt import Attempt
from tests.storage.backends import a_package

SEEDS, CHUNK = 2000 if os.environ.get("RAYSTATE_ALL") else 750, 125
RETIRED, STEPS, NEXT = 2, (4, 6, 8), 10
TREE = {"w": np.ones(3)}

# Names that are not there yet when the link is made.
TO_COME = (
    *(ASIDE, BASES, COMPILED, DEAD, TRASH, WORK, f"{STATE}/events", f"{COMPILED}/{HOST}/used"),
    *(f"{TRASH}/{RETIRED}.a1k2.00000000", f"{WORK}/{NEXT}.a2k{NEXT}", f"{WORK}/{NEXT}.a1k{NEXT}", str(NEXT)),
    *(f"{STATE}/{name}" for name in ("notes", ".raystate-tmp-0000000000000000", "selftest.00000000")),
)  # fmt: skip

Operation = Callable[[Path], object]
Facts = dict[str, tuple[int, ...]]


def package_in(folder: StepFolder) -> Package:
    package, data = a_package(folder.step, str(folder.save))
    for name, part in data.items():
        folder.storage.create(f"{folder.write_prefix}/{name}", part)
    return package


def begin(root: Path) -> Attempt:
    """As the start of a training: an attempt that has claimed the run, and has removed what the earlier ones left."""
    storage = open_storage(root)
    storage.self_test()
    attempt = Attempt(storage, "later", package_in)
    collect_garbage(storage)
    return attempt


def retires(attempt: Attempt, step: int, *, aside: bool = False) -> list[tuple[int, bool, str]]:
    return [(one.step, aside, "due") for one in attempt.tail.live if one.step == step]


def save(root: Path) -> None:
    attempt = begin(root)
    attempt.save(NEXT, retires=retires(attempt, STEPS[0]))


def set_aside(root: Path) -> None:
    attempt = begin(root)
    attempt.append(reason="damaged", retires=retires(attempt, STEPS[1], aside=True))


def programs(root: Path, *, cap_bytes: int = CAP) -> None:
    """Those of a node that has nothing: what is there is fetched, what is not is compiled and put there."""
    with tempfile.TemporaryDirectory() as folder:
        shelf = Shelf(open_storage(root), cap_bytes, host=HOST, rank=0, world=1)
        local = ProgramStore(Path(folder), CAP)
        for key in ("jit_init", "jit_step", "jit_new"):
            local.put(key, key.encode() * 100)
        for name in shelf.begin():
            shelf.fetch(name)
        shelf.offer([program_name(key) for key in ("jit_step", "jit_new")], local)


OPERATIONS: dict[str, Operation] = {
    "programs": programs,
    "too many programs": functools.partial(programs, cap_bytes=900),
    "gc": lambda root: collect_garbage(open_storage(root)),
    "start": begin,
    "save": save,
    "set aside": set_aside,
    "unfinished save": lambda root: package_in(StepFolder(open_storage(root), NEXT, f"a1k{NEXT}")),
    "discard": lambda root: StepFolder(open_storage(root), NEXT, f"a1k{NEXT}").discard(),
    "retire": lambda root: StepFolder(open_storage(root), STEPS[0], f"a1k{STEPS[0]}").retire(),
    "retire aside": lambda root: StepFolder(open_storage(root), STEPS[1], f"a1k{STEPS[1]}").retire(aside=True),
    "rm step": lambda root: remove_step(open_storage(root), STEPS[0]),
    "rm": lambda root: remove_run(open_storage(root)),
    "assume dead": lambda root: assume_dead(open_storage(root), 1),
    "sweep": lambda root: open_storage(root).sweep(STATE),
    "checkpoint beside": lambda root: raystate.save(root.parent / "one", TREE, overwrite=True),
    "checkpoint in it": lambda root: raystate.save(root / "one", TREE, overwrite=True),
    "verify": lambda root: [*(verify_step(open_storage(root), step) for step in STEPS), verify_log(open_storage(root))],
    "read": lambda root: [raystate.Reader(root).latest_step(), visible_steps(open_storage(root))],
}


@pytest.fixture(autouse=True)
def _one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim is tried again for a minute where storage fails."""
    monkeypatch.setattr(RunLog, "claim", functools.partialmethod(RunLog.claim, timeout_s=0.0))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three attempts, with what each of them may leave."""
    root = tmp_path_factory.mktemp("links") / "run"
    storage = open_storage(root)
    first = Attempt(storage, "first", package_in)
    for step in (RETIRED, *STEPS[:2]):
        first.save(step)
    second = Attempt(storage, "second", package_in)
    second.save(STEPS[2], retires=[(RETIRED, False, "three are kept")])
    package_in(StepFolder(storage, 12, "a1k12"))  # a dead save
    storage.create(f"{TRASH}/3.a1k3.0123abcd/state/d/x", b"half removed")
    storage.create(f"{ASIDE}/3.a1k3/state/d/x", b"damaged")
    node = ProgramStore(tmp_path_factory.mktemp("node"), CAP)
    for key in ("jit_init", "jit_step"):
        node.put(key, key.encode() * 100)
    Shelf(storage, CAP, host=HOST, rank=0, world=1).offer([program_name(key) for key in ("jit_init", "jit_step")], node)
    return root


@pytest.fixture(scope="module")
def outside(original: Path) -> Path:
    """What belongs to somebody else. All of it has names as a run's things have them."""
    above = original.parent / "outside"
    shutil.copytree(original, above / "run")
    (above / "run" / ".raystate" / "trash" / "5.a1k5.0123abcd").mkdir()
    (above / "run" / ".raystate-tmp-0123456789abcdef").write_bytes(b"of a writer")
    for name in ("5.a1k5.0123abcd", "12.a1k12", "selftest.0123abcd", "mine"):
        (above / name).mkdir()
        (above / name / ".raystate-tmp-0123456789abcdef").write_bytes(b"of a writer")
        (above / name / "1.000000000000").write_bytes(b"precious")
    return above


def facts(folder: Path) -> Facts:
    """Of all that lies in a folder; changes with anything that is done to it but reading."""
    found: Facts = {}
    for above, folders, files in os.walk(folder):
        for name in (".", *folders, *files):
            at = os.path.join(above, name)
            status = os.lstat(at)
            found[at] = (status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns)
    return found


def link_one(chance: random.Random, original: Path, root: Path, outside: Path) -> str:
    """Put a link in the place of something. Returns what was done."""
    there = sorted(path.relative_to(original).as_posix() for path in original.rglob("*"))
    folders = [name for name in there if (original / name).is_dir() and STATE in name]
    newest = max(name for name in there if name.startswith(f"{LOG}/"))
    coming = [*TO_COME, log_name(int(Path(newest).stem) + 1)]
    name = chance.choice(chance.choice([there, folders, coming, [STATE, TRASH, WORK, LOG, PACKAGES, *map(str, STEPS)]]))
    target = chance.choice([outside / "run" / name, *(outside / other for other in ("", "run", "mine", "nothing", "12.a1k12"))])
    place = root / name
    if any(above.is_symlink() for above in place.parents):  # by an earlier link
        return "nothing"
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target)
    return f"{name} -> {target}"


def complaint(seed: int, original: Path, outside: Path, scratch: Path) -> str:
    """What a seed's link and operations have changed outside; "" if nothing."""
    chance = random.Random(seed)
    above = scratch / str(seed)
    root = above / "run"
    shutil.copytree(original, root, copy_function=os.link)
    done = [link_one(chance, original, root, outside) for _ in range(chance.choice([1, 1, 2]))]
    before = facts(outside)
    try:
        for name in chance.choices([*OPERATIONS], k=chance.choice([1, 2, 3])):
            done.append(name)
            with contextlib.suppress(RaystateError):
                OPERATIONS[name](root)
            after = facts(outside)
            if after != before:
                changed = sorted({*after.items()} ^ {*before.items()})
                return f"seed {seed}: {'; '.join(done)}: {changed[:4]}"
        return ""
    finally:
        shutil.rmtree(above)


def test_without_a_link_each_operation_does_its_work(original: Path, tmp_path: Path):
    for name, operate in OPERATIONS.items():
        root = tmp_path / name / "run"
        shutil.copytree(original, root)
        if name == "checkpoint in it":
            with pytest.raises(RaystateError, match="is the storage of a run"):
                operate(root)
        else:
            operate(root)


@pytest.mark.parametrize("chunk", [0, *(pytest.param(chunk, marks=pytest.mark.more) for chunk in range(1, SEEDS // CHUNK))])
def test_nothing_outside_the_run_is_touched(original: Path, outside: Path, tmp_path: Path, chunk: int):
    seeds = range(FIRST + chunk * CHUNK, FIRST + (chunk + 1) * CHUNK)
    complaints = [told for seed in seeds if (told := complaint(seed, original, outside, tmp_path))]
    assert not complaints, "\n".join(complaints)
