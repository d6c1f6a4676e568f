"""Objects under a URL: create-once, list, delete; the log of a run and the life of a step on top of them."""

from raystate.storage.absence import is_missing, why_empty
from raystate.storage.base import ObjectChangedError, ObjectExistsError, ObjectInfo, ObjectMissingError, Storage
from raystate.storage.foreign import describe_foreign, foreign_checkpoints, refuse_foreign, runs_in
from raystate.storage.garbage import Garbage, assume_dead, assumed_dead, collect_garbage, find_garbage, remove_garbage
from raystate.storage.log import RunLog
from raystate.storage.log_reader import LogGoneError, LogReader
from raystate.storage.namings import number_in, step_folders
from raystate.storage.owner import owner_of
from raystate.storage.placing import new_folder
from raystate.storage.replacing import put_back, replace_tree
from raystate.storage.steps import StepFolder, data_objects, find_package, foreign_steps, marked_save, visible_steps
from raystate.storage.url import OBJECT_SCHEMES, StorageUrl, canonical_url, open_storage, run_hash
from raystate.storage.wrapping import StorageWrapper

__all__ = [
    "OBJECT_SCHEMES",
    "Garbage",
    "LogGoneError",
    "LogReader",
    "ObjectChangedError",
    "ObjectExistsError",
    "ObjectInfo",
    "ObjectMissingError",
    "RunLog",
    "StepFolder",
    "Storage",
    "StorageUrl",
    "StorageWrapper",
    "assume_dead",
    "assumed_dead",
    "canonical_url",
    "collect_garbage",
    "data_objects",
    "describe_foreign",
    "find_garbage",
    "find_package",
    "foreign_checkpoints",
    "foreign_steps",
    "is_missing",
    "marked_save",
    "new_folder",
    "number_in",
    "open_storage",
    "owner_of",
    "put_back",
    "refuse_foreign",
    "remove_garbage",
    "replace_tree",
    "run_hash",
    "runs_in",
    "step_folders",
    "visible_steps",
    "why_empty",
]
