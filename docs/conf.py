"""How `make docs` builds the site: Sphinx, with MyST for the pages. Nothing is fetched; every warning is an error.

The pages of the reference hold a few sentences each. The rest of them is made here, from what Python, pydantic and typer know, so
that a name, a field, a command or a time-out can't be left out or go stale.
"""

from __future__ import annotations

import inspect
import pydoc
import re
import subprocess
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from docutils import nodes
from pydantic.fields import FieldInfo
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import raystate
from raystate import waits
from raystate.observe import metrics

project = "raystate"
author = "The raystate authors"
copyright = author
version = release = raystate.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
myst_links_external_new_tab = True
exclude_patterns = ["_build"]
nitpicky = True
# Python, jax, numpy and ray have sites of their own, which a build without network can't ask for their names.
nitpick_ignore_regex = [(r"py:.*", r"(?!raystate\b).*")]

default_role = "code"  # docstrings quote code with single backticks
napoleon_use_rtype = False
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = "raystate"
html_static_path = ["static"]
html_css_files = ["raystate.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "monokai"


# ---------------------------------------------------------------- the reference, made from the code

_FIRST = ("StateManager", "Restored", "StateConfig", "fit", "RunResult", "RayTrainCallback", "Reader", "load", "save", "metadata")
# Nobody makes these, but everybody reads their attributes.
_GIVEN = ("train.Recovery", "train.RunEvent", "reader.StepMetadata", "reader.ArrayMetadata")


def _public_names() -> str:
    """reStructuredText that documents every name of `raystate.__all__`: those that one uses most first, errors last."""
    names = [name for name in raystate.__all__ if not name.startswith("__")]
    errors = [name for name in names if _is_error(name)]
    rest = [name for name in names if name not in (*_FIRST, *errors)]
    shown = [*(name for name in _FIRST if name in names), *rest]
    given = [f".. autoclass:: raystate.{name}()\n   :members:" for name in _GIVEN]
    parts = ["Names\n-----", *(_directive(name) for name in shown), "What these give\n---------------", *given]
    return "\n\n".join([*parts, "Errors\n------", *(_directive(name) for name in errors)])


def _is_error(name: str) -> bool:
    value = getattr(raystate, name)
    return isinstance(value, type) and issubclass(value, Exception)


def _directive(name: str) -> str:
    value = getattr(raystate, name)
    if inspect.ismodule(value):
        return f".. automodule:: raystate.{name}\n   :members:"
    if not inspect.isclass(value):
        return f".. autofunction:: raystate.{name}" if callable(value) else f".. autodata:: raystate.{name}"
    if name == "StateConfig":  # its fields have a page of their own
        return f".. autoclass:: raystate.{name}()\n   :members: from_file, replace, effective_save_every_s\n   :exclude-members: __init__"
    return f".. autoclass:: raystate.{name}\n   :members:" + ("\n   :show-inheritance:" if _is_error(name) else "")


def _config_fields() -> str:
    """Markdown: each field of `StateConfig` with its type, its default and what its docstring says of it."""
    told = dict(_attributes(inspect.getdoc(raystate.StateConfig) or ""))
    fields = raystate.StateConfig.model_fields
    if missing := set(fields) ^ set(told):
        raise ValueError(f"the docstring of StateConfig and its fields differ: {sorted(missing)}")
    return "\n\n".join(
        f"(config-{name})=\n`{name}` *({_type(name, field)})*\n: {told[name]}\n\n  {_default(field)}"
        for name, field in fields.items()
    )


def _attributes(docstring: str) -> Iterator[tuple[str, str]]:
    """(field, what is said of it) of the section `Attributes:`."""
    section = docstring.partition("Attributes:\n")[2]
    for name, text in re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", section, re.MULTILINE | re.DOTALL):
        yield name, " ".join(text.split())


def _type(name: str, field: FieldInfo) -> str:
    limits = {
        kind: getattr(one, kind) for one in (*field.metadata, *_limits(field.annotation)) for kind in _SIGNS if hasattr(one, kind)
    }
    bounds = "".join(f", {_SIGNS[kind]} {value}" for kind, value in limits.items())
    unit = ", seconds" if name.endswith("_s") else ""
    return f"{_plain(field.annotation)}{bounds}{unit}"


_SIGNS = {"gt": ">", "ge": "≥"}


def _limits(kind: Any) -> Iterator[Any]:
    """What `Annotated` says, at any depth of a union."""
    for one in typing.get_args(kind):
        yield from getattr(one, "__metadata__", ())[:1] and one.__metadata__[0].metadata


def _plain(kind: Any) -> str:
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return " or ".join(_plain(one) for one in typing.get_args(kind))
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(f"`{one!r}`" for one in typing.get_args(kind))
    if typing.get_origin(kind) is typing.Annotated:
        return _plain(typing.get_args(kind)[0])
    return "`None`" if kind is type(None) else f"`{getattr(kind, '__name__', kind)}`"


def _default(field: FieldInfo) -> str:
    return "**Must be given.**" if field.is_required() else f"Default: `{field.default!r}`."


def _commands() -> str:
    """Markdown of every command, by typer's own generator."""
    command = [sys.executable, "-m", "typer", "raystate.cli", "utils", "docs", "--name", "raystate"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return text[text.index("\n## ") :]  # the page has its own title and introduction


_WAIT = re.compile(r"((?:# [^-].*\n)+)(\w+_S) = ")


def _waits() -> str:
    """A table for each part of raystate/waits.py. Each name has a comment, and from "Then" on it says what follows."""
    parts = re.split(r"\n# -{10,} (.+)\n", inspect.getsource(waits))[1:]
    text, shown = "", set[str]()
    for title, part in zip(parts[::2], parts[1::2], strict=True):
        text += f"\n## {title.capitalize()}\n\n| name | seconds | what waits | what happens then |\n|---|---|---|---|\n"
        for comment, name in _WAIT.findall(part):
            what, _, then = " ".join(comment.replace("# ", "").split()).partition(" Then")
            then = then.lstrip(", ")
            text += f"| `{name}` | {getattr(waits, name):,g} | {what} | {then[0].upper()}{then[1:]} |\n"
            shown.add(name)
    assert shown == {name for name in vars(waits) if name.endswith("_S")}, "each name needs a comment"
    return text


def _metrics() -> str:
    """A table for each that knows: name with its labels, kind, and what it says."""
    parts: list[tuple[str, str, Sequence[metrics.Metric]]] = [
        ("Of the run", "The Coordinator knows them. `host` is empty.", metrics.OF_RUNS),
        ("Of its hosts", "By each HostActor's last report. `host` is the node's id in Ray.", metrics.OF_HOSTS),
        ("What was counted", _COUNTED, metrics.COUNTED),
    ]
    text = ""
    for title, what, table in parts:
        text += f"\n## {title}\n\n{what}\n\n| name | kind | value |\n|---|---|---|\n"
        for one in table:
            labels = f" `{{{', '.join(one.labels)}}}`" if one.labels else ""
            text += f"| `{one.name}`{labels} | {one.kind}{f', {one.unit}' if one.unit else ''} | {one.help} |\n"
    return text


_COUNTED = (
    "By the Coordinator (`host` is empty), the HostActors, the trainers and Readers (`host` is their node). "
    "`run` of a process that only reads is empty."
)


_GENERATED = {
    "reference/api": _public_names,
    "reference/config": _config_fields,
    "reference/commands": _commands,
    "reference/metrics": _metrics,
    "reference/waits": _waits,
}


def _complete(app: Sphinx, docname: str, source: list[str]) -> None:
    if docname in _GENERATED:
        source[0] += "\n" + _GENERATED[docname]() + "\n"


# ---------------------------------------------------------------- names of raystate in the text

_NAME = re.compile(r"(raystate(?:\.\w+)+)(?:\(.*\))?", re.DOTALL)


def _refer(app: Sphinx, doctree: nodes.document) -> None:
    """`raystate.Reader.restore`, quoted anywhere, becomes a link; Sphinx warns of a name that there isn't."""
    for literal in list(doctree.findall(nodes.literal)):
        found = _NAME.fullmatch(literal.astext())
        if found is None or isinstance(literal.parent, addnodes.pending_xref | nodes.reference):
            continue
        reference = addnodes.pending_xref(
            "", refdomain="py", reftype="obj", reftarget=found[1], refexplicit=True, refwarn=True, refdoc=app.env.docname
        )
        literal.replace_self(reference)
        reference += literal


def _resolve(app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, contnode: nodes.Element) -> Any:
    """Names that the page of public names doesn't list under that path: those from where they are defined, and modules."""
    target = str(node.get("reftarget", ""))
    if not target.startswith("raystate."):
        return None
    name = target.rpartition(".")[2]
    if name in raystate.__all__ and target != f"raystate.{name}":
        return env.domains.python_domain.resolve_xref(env, node["refdoc"], app.builder, "obj", f"raystate.{name}", node, contnode)
    return contnode if pydoc.locate(target) is not None else None


def _darken(app: Sphinx, doctree: nodes.document) -> None:
    """A picture with a dark form beside it is shown in both, each where the reader's theme is that one."""
    for image in list(doctree.findall(nodes.image)):
        image["classes"].append("wide")
        dark = image["uri"].removesuffix(".svg") + "-dark.svg"
        if (Path(app.env.doc2path(app.env.docname)).parent / dark).exists():
            other = image.deepcopy()
            other["uri"] = dark
            image["classes"].append("only-light")
            other["classes"].append("only-dark")
            image.parent.insert(image.parent.index(image) + 1, other)


def _tidy(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """A list of errors without a word on each, such as "StorageError, CapacityError.", is one of names: without the full stop."""
    for number, line in enumerate(lines):
        if re.fullmatch(r"\s+(\w+Error|Interrupted)(, (\w+Error|Interrupted))*\.", line):
            lines[number] = line.removesuffix(".")


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls it."""
    app.connect("source-read", _complete)
    app.connect("autodoc-process-docstring", _tidy, priority=100)  # before napoleon
    app.connect("doctree-read", _refer)
    app.connect("doctree-read", _darken, priority=100)  # before Sphinx collects the pictures
    app.connect("missing-reference", _resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
