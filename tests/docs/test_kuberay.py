"""The RayJob manifest of the documents is valid by KubeRay's own schema.

`rayjob-v1.schema.json.xz` is the `openAPIV3Schema` of version v1 in `ray-operator/config/crd/bases/ray.io_rayjobs.yaml` of KubeRay v1.7.0
(Apache-2.0, https://github.com/ray-project/kuberay), as JSON.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml

import jobs.train_lm
from tests.docs.running import REPO, fences

PAGE = REPO / "docs" / "howto" / "kuberay.md"


def closed(schema: Any) -> Any:
    """With names that the schema doesn't know refused: the API server would drop them without a word."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: closed(one) for name, one in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        inner["additionalProperties"] = False
    return inner


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = json.loads(lzma.decompress(Path(__file__).with_name("rayjob-v1.schema.json.xz").read_bytes()))
    for name in ("apiVersion", "kind", "metadata"):
        assert name in schema["properties"]
    schema = closed(schema)
    schema["properties"]["metadata"] = {"type": "object"}  # the API server's own
    return jsonschema.Draft202012Validator(schema)


@pytest.fixture
def manifest() -> dict[str, Any]:
    ((_, text),) = fences(PAGE, "yaml")
    return yaml.safe_load(text)


def test_the_manifest_is_valid(manifest: dict[str, Any], validator: jsonschema.Draft202012Validator):
    assert [error.message for error in validator.iter_errors(manifest)] == []


def test_the_manifest_fits_this_version(manifest: dict[str, Any]):
    spec = manifest["spec"]
    assert spec["rayClusterSpec"]["rayVersion"] == ray.__version__
    words = spec["entrypoint"].split()
    assert words[:3] == ["python", "-m", jobs.train_lm.__name__]
    assert (REPO / words[-1]).exists()
    for pod in [group["template"]["spec"] for group in spec["rayClusterSpec"]["workerGroupSpecs"]]:
        mounts = {mount["name"]: mount["mountPath"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert {mounts[volume["name"]] for volume in pod["volumes"]} == {"/dev/shm"}


@pytest.mark.parametrize(
    "path", ["backoffLimits", "rayClusterSpec.rayVersions", "rayClusterSpec.headGroupSpec.template.spec.volume"]
)
def test_a_name_that_there_is_not_is_seen(path: str, manifest: dict[str, Any], validator: jsonschema.Draft202012Validator):
    *folders, name = path.split(".")
    place = manifest["spec"]
    for folder in folders:
        place = place[folder]
    place[name] = []
    assert any(repr(name) in error.message for error in validator.iter_errors(manifest))
