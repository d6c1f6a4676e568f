"""The actors of a run, thin shells over core: one Coordinator, one HostActor per node."""
