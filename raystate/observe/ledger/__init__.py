"""A run's ledger: what happened to it, each line with its time, written into storage beside the run and read from there."""
