"""What raystate uses of Ray's internals: nowhere else are any imported, but for Ray Train's (`raystate.train.rays`).

Ray has no public calls for it. tests/house/test_ray_version.py holds each name that is used
against the installed Ray.
"""

from __future__ import annotations

from raystate.actors.ray_version import ray_internals

with ray_internals():
    import ray._private.authentication.authentication_token_setup as authentication
    import ray._private.state as state
    import ray._private.worker as worker
    import ray.experimental.internal_kv as internal_kv

__all__ = ["authentication", "internal_kv", "state", "worker"]
