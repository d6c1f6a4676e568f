"""What carries the decisions of core out, without Ray: on shared memory, sockets and storage. Actors and tests use the same."""
