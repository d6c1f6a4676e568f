"""The machine of a HostActor and its parts."""
