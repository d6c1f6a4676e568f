"""Where everything lies below a storage's URL."""

from __future__ import annotations

import itertools
import re
import secrets

STATE = ".raystate"
MARKER = "commit_success.txt"
METADATA = "_CHECKPOINT_METADATA"
TREE_METADATA = "_METADATA"  # of an item of arrays
MANIFEST = "manifest.ocdbt"  # of a database of arrays
ORBAX_TEMPORARY = "orbax-checkpoint-tmp"  # in the name of what is unfinished: readers pass over it
GUARD = f"{STATE}/{MARKER}"  # stock Orbax's cleanup deletes folders without it
GUARD_TEXT = b"Stock Orbax deletes folders without this file. It keeps the log of the run.\n"
SELF_TEST = "selftest."  # begins the name of a folder in STATE
LOG = f"{STATE}/log"
BASES = f"{STATE}/bases"  # of log entries, see core.formats.entries
PACKAGES = f"{STATE}/steps"
WORK = f"{STATE}/work"
TRASH = f"{STATE}/trash"
ASIDE = f"{STATE}/aside"
COMPILED = f"{STATE}/compiled"
DEAD = f"{STATE}/dead"  # attempts whose process is known to be gone, because somebody said so

_TRASH = re.compile(rf"{re.escape(TRASH)}/(?:(\d+)\.(?:a\d+k[0-9A-Za-z]+|orbax)|{re.escape(SELF_TEST[:-1])})\.[0-9a-f]{{8}}/?")
_SAVE = re.compile(r"a(\d+)k[0-9A-Za-z]+")
_WRITER = re.compile(r"(?:ocdbt\.process_|d/)(a\d+k[0-9a-gi-zA-Z]+)h[0-9a-z]*")


def log_name(seq: int) -> str:
    return f"{LOG}/{seq:012d}.json"


def number_of(name: str) -> int:
    """The number of a log entry's name; 0 for any other name."""
    found = re.fullmatch(rf"{re.escape(LOG)}/(\d{{12}})\.json", name)
    return int(found[1]) if found else 0


def base_name(base: str) -> str:
    """Where the base lies that a log entry names."""
    return f"{BASES}/{base}"


def base_number(name: str) -> int:
    """The entry that first names this base; 0 for any other name."""
    found = re.fullmatch(rf"{re.escape(BASES)}/(\d{{12}})\.[0-9a-f]+\.json", name)
    return int(found[1]) if found else 0


def package_name(step: int, save: str) -> str:
    return f"{PACKAGES}/{step}.{save}.json"


def work_name(step: int, save: str) -> str:
    return f"{WORK}/{step}.{save}"


def trash_name(step: int, save: str | None, *, above: str = TRASH) -> str:
    """Where a directory's step goes that is retired, or the work folder of a save."""
    return f"{above}/{step}.{save or 'orbax'}.{secrets.token_hex(4)}"


def is_trash(name: str, step: int | None = None) -> bool:
    """Whether something in the trash has a name that raystate gives (None: of any step). Nothing else in it is ever removed."""
    found = _TRASH.fullmatch(name)
    return found is not None and step in (None, int(found[1] or -1))


def step_name(step: int) -> str:
    return str(step)


def step_of(folder: str) -> int | None:
    """The step that a folder's name stands for; None for any other name, such as Orbax's temporary ones, or a number that is no step."""
    if not re.fullmatch(r"0|[1-9][0-9]{0,18}", folder):
        return None
    step = int(folder)
    return step if step < 2**63 else None


def writer_name(save: str, host: int | str) -> str:
    """A writer's unique name, as in `ocdbt.process_<writer>`. `host`: an index, or lower-case letters (the Coordinator: "c")."""
    return f"{save}h{host}"


def marker_last(name: str) -> tuple[bool, int, str]:
    """Sort key for the files of a step: plain files, then the items' markers, the step's own marker at the very end."""
    is_marker = name.rpartition("/")[2] == MARKER
    return is_marker, -name.count("/") if is_marker else 0, name


def save_of(name: str) -> str | None:
    """The save whose writer an object's name belongs to; None for fixed names.

    "state/ocdbt.process_a7k1h0/d/12" gives "a7k1", and so does "state/d/a7k1hm12", a node that the merge of its writers wrote.
    """
    parts = name.split("/")
    for folder, part in itertools.pairwise(("", *parts)):
        if found := _WRITER.fullmatch(f"d/{part}" if folder == "d" else part):
            return found[1]
    return None


def attempt_of(save: str) -> int | None:
    """The attempt in a save id; None if it is not one."""
    found = _SAVE.fullmatch(save)
    return int(found[1]) if found else None


def split_saved(name: str) -> tuple[int, str] | None:
    """(step, save) of a work folder, package file or set-aside folder's base name "<step>.<save>[.…]"; None for anything else."""
    step, _, rest = name.partition(".")
    save = rest.partition(".")[0]
    number = step_of(step)
    return None if number is None or attempt_of(save) is None else (number, save)
