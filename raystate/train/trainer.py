"""Ray Train's JaxTrainer, without what a run of raystate's does not need."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train.v2.jax import JaxTrainer

from raystate.actors.local_ray import has_dashboard
from raystate.patching import patch
from raystate.train.nodes import reach_directly
from raystate.train.rays import datasets, placement_group_callback, placement_group_cleaner
from raystate.waits import AT_ONCE_S


class _NoDatasets:
    """What a worker asks for its share of a dataset where none was given."""

    def get_dataset_shard(self, dataset_info: Any) -> Any:
        raise KeyError(f"there is no dataset {dataset_info.dataset_name!r}: give it to fit(…, datasets={{name: dataset}})")


class _NoDatasetsCallback(datasets.DatasetsCallback):
    """Without datasets, no actor: Ray's imports all of Ray Data for each worker group, just when a
    restarted group needs the cores."""

    def before_init_train_context(self, workers: list[Any]) -> dict[str, list[Any]]:
        return {"dataset_shard_provider": [_NoDatasets()] * len(workers)}


class _Cleaner(placement_group_cleaner.PlacementGroupCleaner):
    """Ray's, which would ask whichever Ray it finds on its machine whether the controller lives."""

    def start_monitoring(self) -> bool:
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        reach_directly()  # the dashboard is asked by HTTP
        return bool(super().start_monitoring())


class _CleanerCallback(placement_group_callback.PlacementGroupCleanerCallback):
    def after_controller_start(self, train_run_context: Any) -> None:
        # Only this controller's process reads it. (test_train_internals.py)
        patch(placement_group_callback, "PlacementGroupCleaner", _Cleaner)
        super().after_controller_start(train_run_context)


class QuietJaxTrainer(JaxTrainer):
    """Ray's, without an actor for datasets where there are none.

    The actor that frees a dead controller's placement group asks the dashboard of its own Ray whether the controller lives. Without a
    dashboard there is no such actor: it would do nothing but say so every second. The group goes with the job.
    """

    controller: Any = None

    def _register_sigint_handler(self, controller: Any) -> None:
        """Without Ray Train's handler, which stays behind and ends the process as if all were well: Ctrl-C is KeyboardInterrupt."""
        self.controller = controller

    def abort(self) -> None:
        """Have no worker group follow, as Ray Train does at Ctrl-C: the driver ends."""
        if self.controller is not None:
            with contextlib.suppress(RayError):  # its end is its answer
                ray.get(self.controller.abort.remote(), timeout=AT_ONCE_S)

    def _create_default_callbacks(self) -> list[Any]:
        callbacks: list[Any] = super()._create_default_callbacks()
        cleaner = placement_group_callback.PlacementGroupCleanerCallback
        callbacks = [one for one in callbacks if not isinstance(one, cleaner)]
        if has_dashboard():
            callbacks.insert(0, _CleanerCallback())
        if not self.datasets:
            none = _NoDatasetsCallback(train_run_context=self.train_run_context, datasets={})
            callbacks = [none if isinstance(one, datasets.DatasetsCallback) else one for one in callbacks]
        return callbacks
