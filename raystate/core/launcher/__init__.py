"""What the launcher decides."""
