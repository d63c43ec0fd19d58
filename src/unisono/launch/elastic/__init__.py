"""Ranks that may die and join while they train; `unisono.train.elastic` is the users' side.

`coordinator` decides for all members, and in each of them, without a process in sight;
`policy` stands beside the ranks of a run: it carries words and orders, and replaces the dead.
"""
