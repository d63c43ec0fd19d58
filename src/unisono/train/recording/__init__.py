"""The record of a run: what ranks write into `runs/NAME`, and the pages drawn from it.

Ranks write (`run`) into a directory (`directory`); their launcher, or rank 0, reads it
(`reading`), works out the figures (`figures`) and draws the page (`report`), or one that follows a
running job (`live`).
"""
