"""The vocabulary between the decisions in core and the shells that carry them out.

Everything here is a frozen value of the standard library's types, so that it pickles, prints, compares and can be replayed. Events go
into `Coordinator.handle`, commands come out of it. A shell translates: it never decides.

Words: see docs/concepts.md. A `group` is one start of the worker group, drawn by the launcher. The
Coordinator answers it with a `Lineage`, and each restore of the group with the next one. A save id
is `a<attempt>k<counter>`, unique per save try.
"""

# ruff: noqa: F403 - a kind of message is named where it is declared, and here no second time

from __future__ import annotations

from raystate.core.formats.commands import *
from raystate.core.formats.declared import *
from raystate.core.formats.entries import *
from raystate.core.formats.events import *
from raystate.core.formats.names import *
from raystate.core.formats.orders import *
from raystate.core.formats.questions import *
from raystate.core.formats.replies import *
from raystate.core.formats.reports import *
from raystate.core.formats.settings import *
