"""Launching on Ray Train: `fit` and `RayTrainCallback`. Everything that depends on Ray Train's internals is in this package."""

from raystate.actors.launch_context import check_world
from raystate.actors.ray_version import ray_internals
from raystate.public_calls import public

with ray_internals():
    from raystate.train.callback import RayTrainCallback
    from raystate.train.events import RunEvent
    from raystate.train.launch import fit
    from raystate.train.result import Recovery, RunResult

RayTrainCallback.__init__ = public(RayTrainCallback.__init__)

__all__ = ["RayTrainCallback", "Recovery", "RunEvent", "RunResult", "check_world", "fit"]
