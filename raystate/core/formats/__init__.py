"""What the machines say and write down: messages, entries of the log, control words, trees, names, errors."""
