"""One pool of ranks: a warm server forks them, a client starts and holds them, a monitor watches.

`unisono.run`, the pytest plugin and the tests of this repository use the same one.
"""
