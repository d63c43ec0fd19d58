"""A job whose ranks may die and join while it trains; `unisono.train.elastic` is its users' side.

`coordinator` decides, without a process in sight; `hub` carries its orders and the shared memory;
`supervisor` watches the processes, starts new ones, and ends those that stand still.
"""
