"""Training with the same bits for any number of ranks, also while some die or join.

`run` is the loop, `shards` the arithmetic of a batch cut into fixed shards, `data` which samples
they hold, `link` the way to the other members.
"""
