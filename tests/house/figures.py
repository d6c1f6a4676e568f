"""The house in figures: `make house`. They are to go down; none is met by longer lines or by code that is put where it isn't counted."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

REPO = Path(__file__).parents[2]
CORE = REPO / "raystate/core"
_QUIET = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}
MOST_ATTRIBUTES = 18
_SECONDS = re.compile(r"^_?[A-Z0-9_]*_S$")
_VAGUE = re.compile(r"\b(nobody|whoever)\b", re.IGNORECASE)
# Of other packages: what they call private by name or by folder.
_PRIVATE = re.compile(r"^(ray|jax|jaxlib)\..*\b_\w+|^(ray|jax|jaxlib)\._\w+|^ray\.experimental\.internal_kv")


def sources(folder: Path) -> Iterator[tuple[Path, str, ast.Module]]:
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text()
        yield path, text, ast.parse(text)


def code_lines(text: str, tree: ast.Module) -> int:
    """Lines without blanks, comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _QUIET:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def all_code(folder: Path) -> int:
    return sum(code_lines(text, tree) for _, text, tree in sources(folder))


MESSAGES = ("commands.py", "declared.py", "events.py", "host_messages.py", "orders.py", "questions.py", "replies.py")


def messages(base: str = "") -> set[str]:
    """Public classes of these modules of core from which none derives; with `base`: of those that do derive from it."""
    trees = [ast.parse((CORE / "formats" / name).read_text()) for name in MESSAGES]
    classes = {
        node.name: {ast.unparse(one) for one in node.bases}
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }

    def ancestors(name: str) -> set[str]:
        return {one for parent in classes.get(name, ()) for one in (parent, *ancestors(parent))}

    bases = set().union(*classes.values())
    return {name for name in classes if not name.startswith("_") and name not in bases and (not base or base in ancestors(name))}


def parts() -> int:
    """Parts that the Coordinator's machine makes itself, not those that a part has of its own."""
    (machine,) = (
        node
        for node in ast.parse((CORE / "coordinator" / "machine.py").read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "Coordinator"
    )
    (init,) = (node for node in machine.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    made = [node.value for node in ast.walk(init) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
    return sum(isinstance(call.func, ast.Name) and call.func.id[0].isupper() for call in made)


def longest_chain() -> int:
    """Modules of core in a row, each of which imports the next."""
    imports: dict[str, set[str]] = {}
    for path, _, tree in sources(CORE):
        found = [
            (node.module, alias.name)
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        ]
        name = ".".join(path.relative_to(REPO).with_suffix("").parts)
        imports[name] = {
            one for module, alias in found for one in (module, f"{module}.{alias}") if one.startswith("raystate.core.")
        }
    depths: dict[str, int] = {}

    def depth(name: str) -> int:
        if name not in depths:
            depths[name] = 1 + max((depth(one) for one in imports.get(name, ())), default=0)
        return depths[name]

    return max(map(depth, imports))


def rooms() -> set[str]:
    """Packages and loose modules at raystate's top, but for its door."""
    return {path.stem for path in (REPO / "raystate").iterdir() if not path.name.startswith(("_", ".")) and path.suffix != ".typed"}


def loose_modules() -> set[str]:
    return {path.stem for path in (REPO / "raystate").glob("*.py") if not path.name.startswith("_")}


def arrows() -> set[tuple[str, str]]:
    """(room, another that it imports)"""
    found: set[tuple[str, str]] = set()
    known = rooms()
    for path, _, tree in sources(REPO / "raystate"):
        room = path.relative_to(REPO / "raystate").parts[0].removesuffix(".py")
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "raystate":
                inner = node.module.split(".")[1:2] or [alias.name for alias in node.names]
                found |= {(room, one) for one in inner if one in known and one != room and room in known}
    return found


def attributes() -> dict[str, int]:
    """Of each class: how many its methods set, or it declares as the fields of a dataclass that isn't frozen."""
    found: dict[str, int] = {}
    for _, _, tree in sources(REPO / "raystate"):
        for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            written = {
                node.attr
                for node in ast.walk(kind)
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
            }
            made = " ".join(map(ast.unparse, kind.decorator_list))
            if "dataclass" in made and "frozen=True" not in made:
                written |= {ast.unparse(node.target) for node in kind.body if isinstance(node, ast.AnnAssign)}
            found[kind.name] = len(written)
    return found


def time_outs() -> Iterator[tuple[str, str]]:
    """Names of modules that are named as seconds, and what each is set to."""
    for _, _, tree in sources(REPO / "raystate"):
        for node in tree.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else None
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name) and _SECONDS.match(target.id):
                yield target.id.lstrip("_"), ast.unparse(node.value) if node.value is not None else ""


def with_two_values(found: Iterable[tuple[str, str]]) -> int:
    values: dict[str, set[str]] = defaultdict(set)
    for name, value in found:
        values[name].add(value)
    return sum(len(one) > 1 for one in values.values())


def private_imports() -> int:
    """Imports of private names of Ray and JAX."""
    found = 0
    for _, _, tree in sources(REPO / "raystate"):
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                found += sum(bool(_PRIVATE.match(f"{node.module}.{alias.name}")) for alias in node.names)
            elif isinstance(node, ast.Import):
                found += sum(bool(_PRIVATE.match(alias.name)) for alias in node.names)
    return found


def patches() -> int:
    """Names of other packages that raystate replaces: all by raystate/patching.py (test_imports.py)."""
    return sum(
        isinstance(node, ast.Call) and ast.unparse(node.func) in ("patch", "patched")
        for path, _, tree in sources(REPO / "raystate")
        for node in ast.walk(tree)
        if path.stem != "patching"
    )


def private_uses() -> int:
    """Uses of what raystate.actors.rays and raystate.train.rays hand on of Ray's internals."""
    found = 0
    for _, _, tree in sources(REPO / "raystate"):
        handed = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module in ("raystate.actors.rays", "raystate.train.rays")
            for alias in node.names
        }
        names = (node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        found += sum(isinstance(name, ast.Name) and name.id in handed for name in names)
    return found


def functions(folder: Path, pattern: str) -> int:
    return sum(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and re.fullmatch(pattern, node.name) is not None
        for _, _, tree in sources(folder)
        for node in ast.walk(tree)
    )


def vague_words() -> int:
    """ "nobody" and "whoever" in docstrings, comments, messages and documents."""
    pages = [*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md")]
    texts = [page.read_text() for page in pages] + [text for _, text, _ in sources(REPO / "raystate")]
    return sum(len(_VAGUE.findall(text)) for text in texts)


def words() -> int:
    """As `wc -w` counts them in docs and README."""
    return sum(len(page.read_text().split()) for page in [REPO / "README.md", *(REPO / "docs").rglob("*.md")])


def figures() -> dict[str, int]:
    return {
        "code lines, raystate": all_code(REPO / "raystate"),
        "code lines, raystate/core": all_code(CORE),
        "code lines, tests": all_code(REPO / "tests"),
        "code lines, jobs and benchmarks": all_code(REPO / "jobs") + all_code(REPO / "benchmarks"),
        "kinds of messages": len(messages()),
        "events of the Coordinator": len(messages("Event")),
        "parts of the Coordinator": parts(),
        "longest import chain in core": longest_chain(),
        "loose modules": len(loose_modules()),
        "rooms and loose modules at the top": len(rooms()),
        "arrows between them": len(arrows()),
        "attributes of the largest class": max(attributes().values()),
        "classes with more than 18 attributes": sum(one > MOST_ATTRIBUTES for one in attributes().values()),
        "files directly in core": len(list(CORE.glob("*.py"))) - 1,
        'methods named "turn" or "tick" in core': functions(CORE, "turn|tick"),
        "time-outs of modules": len(list(time_outs())),
        "names of time-outs with two values": with_two_values(time_outs()),
        "imports of private names of Ray and JAX": private_imports(),
        "uses of Ray's internals behind them": private_uses(),
        "names of other packages that are replaced": patches(),
        'tests named "test_row…"': functions(REPO / "tests", r"test_row\d+.*"),
        '"nobody" and "whoever"': vague_words(),
        "words of docs and README": words(),
    }


if __name__ == "__main__":
    for name, value in figures().items():
        sys.stdout.write(f"{name:42} {value:>7,}\n")
