"""The layers of `unisono.nn`, one file for each kind."""
