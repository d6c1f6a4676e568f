"""The loop that carries out a host's commands, without Ray."""
