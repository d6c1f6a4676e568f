"""Importing is cheap and core stands alone: each proof in a fresh interpreter, because this one has loaded everything."""

import json
import pkgutil
import sys

import pytest

import raystate
import raystate.core
from tests.processes import run_python

HEAVY = ("ray", "jax", "jaxlib", "numpy", "orbax", "tensorstore", "fsspec", "gcsfs", "pydantic", "yaml", "flax")


def loaded_after(statements: str) -> set[str]:
    """Top-level names in sys.modules of a fresh interpreter that ran `statements`, less those of the bare interpreter."""
    program = (
        "import sys, json\nbefore = set(sys.modules)\n"
        f"{statements}\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in set(sys.modules) - before})))"
    )
    return set(json.loads(run_python("-c", program).stdout.splitlines()[-1]))


def test_core_loads_nothing_but_the_standard_library():
    modules = ["raystate.core", *(m.name for m in pkgutil.walk_packages(raystate.core.__path__, "raystate.core."))]
    assert len(modules) > 3
    loaded = loaded_after("\n".join(f"import {module}" for module in modules))
    assert loaded - set(sys.stdlib_module_names) == {"raystate"}


def test_import_raystate_is_lazy():
    assert loaded_after("import raystate").isdisjoint(HEAVY)


def test_errors_need_no_heavy_module():
    assert loaded_after("from raystate import ConfigError, Interrupted").isdisjoint(HEAVY)


def test_config_loads_neither_ray_nor_jax():
    loaded = loaded_after("from raystate import StateConfig\nStateConfig(storage='/nonexistent/x', run='x')")
    assert loaded.isdisjoint({"ray", "jax", "jaxlib", "orbax", "flax"})


@pytest.mark.parametrize("module", ["raystate.storage", "raystate.arena", "raystate.orbax.writer", "raystate.actors.host"])
def test_what_a_host_actor_uses_loads_neither_jax_nor_orbax(module: str):
    assert loaded_after(f"import {module}").isdisjoint({"jax", "jaxlib", "orbax", "flax"})


def test_every_public_name_resolves():
    missing = [name for name in raystate.__all__ if getattr(raystate, name, None) is None]
    assert not missing
    assert set(raystate.__all__) <= set(dir(raystate))


def test_unknown_name_offers_the_near_one():
    with pytest.raises(AttributeError, match=r"StateManger.*did you mean 'StateManager'"):
        raystate.StateManger  # noqa: B018
    assert not hasattr(raystate, "nothing_like_it_xyz")
