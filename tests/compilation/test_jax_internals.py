"""What raystate.compilation.jax_cache replaces in JAX. If this fails after an upgrade of JAX, read that module first."""

# JAX's private modules are not typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportAttributeAccessIssue=false, reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from jax._src import compilation_cache, compiler
from jax._src.compilation_cache_interface import CacheInterface

from raystate.compilation import ProgramStore, jax_cache


def test_they_are_there_with_these_arguments():
    assert jax_cache.known_internals()


def test_process_0_alone_writes_and_calls_what_we_call():
    source = inspect.getsource(compiler._cache_write)
    assert "process_id != 0" in source, "JAX writes on every process now: is our own writing still needed?"
    assert "put_executable_and_time(" in source
    has_callbacks = jax_cache.CALLBACKS in inspect.signature(compiler._cache_write).parameters
    assert has_callbacks == ("if host_callbacks:" in source)
    assert "_cache_write(" in inspect.getsource(compiler._compile_and_write_cache)


def test_the_cache_is_opened_and_used_as_we_think():
    assert "get_file_cache(path)" in inspect.getsource(compilation_cache._initialize_cache)
    assert CacheInterface.__abstractmethods__ == {"get", "put"}
    for name in ("get", "put"):
        theirs, ours = getattr(CacheInterface, name), getattr(jax_cache._KeptCache, name)
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


def test_the_shortest_compilation_worth_keeping_is_still_a_second_by_default():
    import jax

    assert hasattr(jax.config, jax_cache._MIN_SECONDS)


def test_beside_another_jax_a_warning_says_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    import jax

    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setattr(jax_cache, "_kept", None)
    monkeypatch.setattr(compiler, "_cache_write", lambda key, value: None)
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        assert jax_cache.keep_programs(ProgramStore(tmp_path, 1 << 20)) == "JAX keeps them itself"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    (told,) = [record for record in caplog.records if record.name == "raystate"]
    assert told.levelname == "WARNING" and "compile theirs again after each restart" in told.message
