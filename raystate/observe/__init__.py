"""Facts for people to look at: ledger, record, ends, progress."""
