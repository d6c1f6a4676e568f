"""What users need to test with raystate.

- `raystate.testing.gcs`: a local, strict Cloud Storage server, with faults if asked (`python -m raystate.testing.gcs --port 4480`).
- `raystate.testing.storage`: storages that fail on purpose, and the tests that every storage back end passes.
"""
