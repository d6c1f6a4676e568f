"""What users need to test with raystate. `raystate.testing.gcs` is a strict local Cloud Storage server."""
