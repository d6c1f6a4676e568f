"""What carries out the Coordinator's commands, without Ray."""
