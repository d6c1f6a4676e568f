"""What keeping a step asks of the training thread and of the compiler: counted, not timed."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

from raystate.arrays.spare import ALIKE, GROUP, MOST_PROGRAMS, Spare
from raystate.arrays.stage import copy, hold
from raystate.arrays.tree import describe
from raystate.machine.aligned import SMALL_BYTES

COMPILED = "/jax/core/compile/backend_compile_duration"
LARGE = SMALL_BYTES // 4 + 1  # elements of float32


@contextmanager
def compiled() -> Iterator[list[str]]:
    """The programs that are compiled meanwhile."""
    found: list[str] = []

    def listen(event: str, duration_secs: float, **facts: str | int) -> None:
        if event == COMPILED:
            found.append(str(facts.get("fun_name", event)))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def arrays(number: int, elements: int, dtype="float32", seed: int = 0):
    random = np.random.default_rng(seed)
    return [jax.device_put(random.standard_normal(elements).astype(dtype)) for _ in range(number)]


def bytes_of(state) -> bytes:
    described = describe({"state": state})
    data = np.zeros(described.layout.data_bytes, np.uint8)
    for piece, leaf in zip(described.layout.pieces, described.leaves, strict=True):
        data[piece.offset : piece.offset + piece.nbytes] = np.asarray(leaf).reshape(-1).view(np.uint8)
    return data.tobytes()


def kept(state, spare: Spare, plan=None):
    """(plan, bytes) of a save."""
    described = describe({"state": state}, previous=plan)
    data = np.zeros(described.layout.data_bytes, np.uint8)
    copy(hold(described, spare), data)
    spare.prepare()
    return described.plan, data.tobytes()


def test_ten_thousand_small_arrays_are_kept_without_a_program():
    """One program of all of them took 49 s to compile on the training thread."""
    state, spare = arrays(10_000, 16), Spare()
    with compiled() as programs:
        plan, first = kept(state, spare)
        for _ in range(3):
            plan, again = kept(state, spare, plan)
            assert again == first
    assert programs == []
    assert first == bytes_of(state)


def test_small_arrays_without_buffers_take_one_program_for_each_shape_of_many():
    """numpy knows no buffer of bfloat16."""
    state = arrays(ALIKE, 16, jnp.bfloat16) + arrays(ALIKE, 24, jnp.bfloat16) + arrays(GROUP + 1, 32, jnp.bfloat16)
    described, spare = describe({"state": state}), Spare()
    data = np.zeros(described.layout.data_bytes, np.uint8)
    with compiled() as by_hold:
        held = hold(described, spare)
    assert len(by_hold) == 2, "of the third shape there are too few to be worth it on the training thread"
    with compiled() as behind:
        copy(held, data)
        spare.prepare()
    assert len(behind) == 2, "they are groups, of 64 and of one"
    assert data.tobytes() == bytes_of(state)
    with compiled() as later:
        assert kept(state, spare, described.plan)[1] == bytes_of(state)
    assert later == []


def test_programs_for_large_arrays_are_few_and_not_compiled_by_hold():
    """Groups alike share one; the training thread compiles nothing, and the second save has them."""
    state = arrays(2 * GROUP + 1, LARGE) + arrays(3, 2 * LARGE)
    spare, plan = Spare(), None
    for number in range(3):
        described = describe({"state": state}, previous=plan)
        plan, data = described.plan, np.zeros(described.layout.data_bytes, np.uint8)
        with compiled() as by_hold:
            held = hold(described, spare)
        assert by_hold == []
        with compiled() as behind:
            copy(held, data)
            spare.prepare()
        assert len(behind) == (2 if number == 0 else 0), "one for 64 arrays, one for the four that are left"
        assert data.tobytes() == bytes_of(state)
    assert len(spare._programs) == 2


def test_so_many_programs_and_no_more():
    state = [array for number in range(MOST_PROGRAMS + 3) for array in arrays(GROUP, LARGE + number)]
    spare = Spare()
    plan, first = kept(state, spare)
    assert len(spare._programs) == MOST_PROGRAMS
    assert kept(state, spare, plan)[1] == first == bytes_of(state)


@pytest.mark.parametrize("elements", [64, LARGE * 64], ids=["small", "large"])
def test_another_order_in_memory_is_saved_in_row_major_order(elements):
    """A jitted step may choose the layout of what it gives; its memory is then not what a reader expects."""
    columns = Format(Layout(major_to_minor=(1, 0)), SingleDeviceSharding(jax.devices()[0]))
    x = jax.jit(lambda x: x * 2, out_shardings=columns)(jnp.arange(float(elements)).reshape(8, -1))
    assert x.format.layout.major_to_minor == (1, 0)
    spare, plan = Spare(), None
    for _ in range(3):
        plan, got = kept([x], spare, plan)
        assert got == np.ascontiguousarray(np.asarray(x)).tobytes()


@pytest.mark.parametrize("setting", ["debug_nans", "debug_infs"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_is_not_finite_is_kept_while_jax_looks_for_it(setting: str, dtype):
    """`save` raised what is meant for JAX itself, and waited for the step."""
    bad = np.full(LARGE, np.nan if setting == "debug_nans" else -np.inf, dtype)
    state = [jax.device_put(bad), *(jax.device_put(bad[:16]) for _ in range(ALIKE))]
    spare, plan = Spare(), None
    with getattr(jax, setting)(True):
        for _ in range(3):
            plan, got = kept(state, spare, plan)
            assert got == bytes_of(state)


@pytest.mark.parametrize(("elements", "number"), [(64, 1), (64, ALIKE), (LARGE, 1)], ids=["small", "many", "large"])
def test_arrays_in_other_memory_of_the_device_are_kept(elements: int, number: int):
    """Of an optimizer that is offloaded to the host. The second save of one ended the process: SIGABRT, in JAX."""
    device = jax.devices()[0]
    for dtype in (jnp.float32, jnp.bfloat16):
        spare, plan = Spare(), None
        for step in range(3):
            kinds = [memory.kind for memory in device.addressable_memories()]
            state = [
                jax.device_put(np.full(elements, step, dtype), SingleDeviceSharding(device, memory_kind=kind))
                for kind in kinds
                for _ in range(number)
            ]
            plan, got = kept(state, spare, plan)
            assert got == bytes_of(state)


def test_small_arrays_that_are_donated_right_after_are_kept_as_they_were():
    @functools.partial(jax.jit, donate_argnums=0)
    def step(x, passes):
        return jax.lax.fori_loop(0, passes, lambda _, y: jnp.sin(y) + x, x)

    spare, plan = Spare(), None
    for passes in (1, 1000, 100_000):  # ready or not
        state = [step(x, passes) for x in arrays(20, 64)]
        expected = bytes_of([step(x, passes) for x in arrays(20, 64)])
        described = describe({"state": state}, previous=plan)
        plan = described.plan
        held = hold(described, spare)
        state = [step(x, 3) for x in state]
        assert all(leaf.is_deleted() for leaf in described.leaves)
        data = np.zeros(described.layout.data_bytes, np.uint8)
        copy(held, data)
        spare.prepare()
        assert data.tobytes() == expected
