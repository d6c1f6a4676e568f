"""The loop that carries out the Coordinator's commands, without Ray."""
