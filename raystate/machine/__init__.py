"""This computer: memory, threads, time, priority, signals, checksums."""
