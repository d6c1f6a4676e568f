"""The Coordinator's machine and its parts."""
