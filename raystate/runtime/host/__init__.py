"""What carries out a host's commands, without Ray."""
