"""A soak: a real training on a simulated Ray cluster, and faults of all kinds that a seed chooses. See `python -m jobs.drill --help`.

`plan` chooses, `outcomes` judges and sums up, `table` shows: none of them needs a cluster. `training` is what runs on it, `cluster` and
`given` are the machines it runs on, `strikes` breaks things, `watch` sees what came of it, and `soak` goes through it all.
"""
