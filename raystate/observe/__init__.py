"""What people look at: ledger, record, ends, progress."""
