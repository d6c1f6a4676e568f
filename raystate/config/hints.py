"""What Orbax and Flax call things, and what raystate calls them: for the errors that somebody meets who comes from there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# Names of modules' members -> what to use.
MEMBERS = {
    **dict.fromkeys(
        ("Checkpointer", "CheckpointManager", "AsyncCheckpointer", "AsyncManager"),
        "raystate.StateManager is what a training holds; without a run: raystate.save(path, tree) and raystate.load(path)",
    ),
    **dict.fromkeys(
        (
            "StandardCheckpointer", "PyTreeCheckpointer", "JsonCheckpointer", "Checkpoint",
            "save_pytree", "save_pytree_async", "load_pytree", "load_pytree_async",
        ),
        "raystate.save(path, tree) and raystate.load(path, reference) write and read one checkpoint",
    ),
    **dict.fromkeys(
        ("CheckpointManagerOptions", "Config", "Options", "Context", "CheckpointConfig"), "raystate.StateConfig has the settings of a run"
    ),
    **dict.fromkeys(
        ("save_checkpointables", "save_checkpointables_async"),
        "raystate.save(path, tree, items={…}) writes one checkpoint of several items, StateManager.save(step, state, items={…}) a run's",
    ),
    **dict.fromkeys(
        ("load_checkpointables", "load_checkpointables_async"),
        "raystate.load(path, items={…}) reads items of one checkpoint, StateManager.restore(reference, items={…}) a run's",
    ),
    **dict.fromkeys(("checkpointables_metadata", "pytree_metadata"), "raystate.metadata(path) has all items"),
    "training": "for v1.training.Checkpointer raystate.StateManager; for flax.training.checkpoints raystate.compat.flax_checkpoints",
    "save_checkpoint_multiprocess": "StateManager.save(step, state) saves from all processes; raystate.compat.flax_checkpoints keeps it",
    **dict.fromkeys(
        (
            "args", "StandardSave", "StandardRestore", "PyTreeSave", "PyTreeRestore", "Composite", "CheckpointArgs", "ArraySave",
            "ArrayRestore", "JsonSave", "JsonRestore", "SaveArgs",
        ),
        "no arguments are wrapped: save(step, state, items={…}), restore(reference, items={…})",
    ),
    **dict.fromkeys(
        ("JaxRandomKeySave", "JaxRandomKeyRestore", "NumpyRandomKeySave", "NumpyRandomKeyRestore"),
        "typed keys of JAX are leaves of the state as they are; NumPy's: an item with get_state and set_state",
    ),
    **dict.fromkeys(
        ("RestoreArgs", "ArrayRestoreArgs", "construct_restore_args", "checkpoint_utils"),
        "leaves of the reference say it: a jax.ShapeDtypeStruct with its sharding, a numpy array, a number; cast=True, partial=True",
    ),
    **dict.fromkeys(
        (
            "CheckpointHandler", "StandardCheckpointHandler", "PyTreeCheckpointHandler", "JsonCheckpointHandler",
            "ArrayCheckpointHandler", "CompositeCheckpointHandler", "CheckpointHandlerRegistry", "handlers",
        ),
        "trees, JSON values, iterators and v1's checkpointables need no handler: save(step, state, items={…})",
    ),
    **dict.fromkeys(("AsyncOptions", "MultiprocessingOptions", "FileOptions", "options"), "raystate.StateConfig has all settings of a run"),
    **dict.fromkeys(("Transform", "RestoreTransform", "apply_transformations"), "use transforms={new path: old path or a function}"),
    **dict.fromkeys(
        ("checkpoints_iterator", "wait_for_new_checkpoint"), "raystate.Reader(storage).follow() gives each step as it becomes durable"
    ),
    **dict.fromkeys(("delete", "delete_async"), "StateManager.delete(step) of a run; `raystate rm`; else remove the folder"),
    "is_orbax_checkpoint": "raystate.metadata(path) raises StepNotFoundError where there is none",
    "AsyncResponse": "raystate.save_async(path, tree) and raystate.load_async(path) give a concurrent.futures.Future",
    "PLACEHOLDER": "use ... in the reference, or leave the path out",
    "StatefulCheckpointable": "an object with `async def save` and `async def load` is an item as it is: save(step, state, items={…})",
    "save_checkpoint": "raystate.save(path, tree) writes one checkpoint, StateManager.save(step, state) the steps of a run",
    "restore_checkpoint": "raystate.load(path, reference) reads one checkpoint, StateManager.restore(reference) the newest step of a run",
    "restore": "raystate.load(path, reference), or raystate.Reader(storage).restore(reference)",
    **dict.fromkeys(("latest_step", "latest_checkpoint"), "raystate.Reader(storage).latest_step()"),
    **dict.fromkeys(("all_steps", "available_steps"), "raystate.Reader(storage).all_steps()"),
    "JaxTrainer": "ray.train.v2.jax.JaxTrainer, with callbacks=[raystate.RayTrainCallback(config)]; or raystate.fit, which makes it",
    **dict.fromkeys(("RunConfig", "ScalingConfig", "FailureConfig"), "ray.train has it; raystate.fit passes it on"),
}  # fmt: skip

_NOT_NEEDED = "raystate has no such choice; leave it out"
_BY_ITS_NUMBER = "a step's folder is called by its number alone; leave it out"
_BACKGROUND = "deletes always run in the background, in the Coordinator; leave it out"

# Fields of Orbax's CheckpointManagerOptions, and arguments of Flax's save_checkpoint -> the field of StateConfig, or what to do.
FIELDS = {
    "directory": "use storage",
    "ckpt_dir": "use storage",
    "path": "use storage",
    "name": "use run",
    "save_interval_steps": "use save_every_steps",
    "max_to_keep": "use keep_last",
    "keep": "use keep_last",
    "keep_time_interval": "use keep_every_s, in seconds",
    "keep_period": "use keep_every_steps",
    "keep_every_n_steps": "use keep_every_steps",
    "best_fn": "use best_metric, the name in save(metrics=…) that ranks the steps, with keep_best, how many of them to keep",
    "keep_checkpoints_without_metrics": "use keep_last: the newest steps are kept with and without metrics",
    "step_prefix": _BY_ITS_NUMBER,
    "prefix": _BY_ITS_NUMBER,
    "step_format_fixed_length": _BY_ITS_NUMBER,
    "step_name_format": _BY_ITS_NUMBER,
    "create": "storage is always created; leave it out",
    "overwrite": "use restore(step=…, rollback=True), which retires the newer steps; leave it out",
    "cleanup_tmp_directories": "`raystate gc` removes what crashed attempts have left; leave it out",
    "save_on_steps": "use save_policy=SpecificStepsPolicy(…) of Orbax, or save(step, state, force=True) at those steps",
    "should_save_fn": "use save_policy, or save(step, state, force=True) where it is true",
    "single_host_load_and_broadcast": "each process reads its own share; leave it out",
    "todelete_subdir": _BACKGROUND,
    "todelete_full_path": _BACKGROUND,
    "enable_background_delete": _BACKGROUND,
    "num_deletion_threads": _BACKGROUND,
    "read_only": "use raystate.Reader(storage), which writes nothing",
    "enable_async_checkpointing": "saves always run in the background, and wait_until_finished() waits for them; leave it out",
    "async_options": "saves always run in the background; their deadline is save_timeout_s",
    "multiprocessing_options": "use start_timeout_s and barrier_timeout_s for the deadlines; the rest is found out",
    "file_options": _NOT_NEEDED,
    "chunk_byte_size": "use chunk_bytes",
    "target_data_file_size": "use file_bytes",
    "ocdbt_target_data_file_size": "use file_bytes",
    "use_compression": "use zstd_level=1; without it nothing is compressed",
    "compression": "use zstd_level=1; without it nothing is compressed",
    "use_ocdbt": "every step is written as OCDBT; leave it out",
    "use_zarr3": "every step is written as zarr3; leave it out",
    "dtype": "cast what you save: manager.save(step, jax.tree.map(lambda x: x.astype(dtype), state)); restore(…, cast=True) casts back",
    "atomicity_options": "every commit is all-or-nothing; leave it out",
    "save_root_metadata": "use save(…, custom=…), which each step keeps; leave it out",
    "temporary_path_class": "every commit is all-or-nothing; leave it out",
    "save_decision_policy": "use save_policy, which takes it as it is",
    "save_decision_policies": "use save_policy with AnySavePolicy",
    "preservation_policy": "use keep_policy, which takes it as it is",
    "prevent_write_metrics": "leave metrics out of save(); leave it out",
    "enable_should_save_is_saving_in_progress_check": "a due step is saved also while an earlier one is being written; leave it out",
    "enable_per_process_directory_creation": _NOT_NEEDED,
    "lightweight_initialize": _NOT_NEEDED,
}  # fmt: skip

# Methods and properties of Orbax's managers -> those of ours.
METHODS = {
    **dict.fromkeys(("latest", "checkpoints"), "use latest_step(), all_steps() and metadata(step)"),
    "item_metadata": "use metadata(step).trees",
    "metrics": "use metadata(step).metrics",
    "root_metadata": "use metadata(step).run",
    **dict.fromkeys(("pytree_metadata", "checkpointables_metadata"), "use metadata(step)"),
    "reload": "each call looks; leave it out",
    "directory": "use config.storage",
    "wait": "use wait_until_finished()",
    **dict.fromkeys(("load", "load_async", "load_pytree", "load_pytree_async"), "use restore(reference, step=…)"),
    **dict.fromkeys(("load_checkpointables", "load_checkpointables_async"), "use restore(reference, items={…})"),
    **dict.fromkeys(("save_async", "save_pytree", "save_pytree_async"), "use save(step, state), which returns at once"),
    **dict.fromkeys(("save_checkpointables", "save_checkpointables_async"), "use save(step, state, items={…})"),
    "delete_async": "use delete(step), which returns at once",
    "cancel": "a save that has begun goes on; leave it out",
}


class KnowsOthers:
    """A class whose AttributeErrors say what Orbax's methods are called here."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raises AttributeError: there is nothing else to find."""
            hint = f": {METHODS[name]}" if name in METHODS else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self)
