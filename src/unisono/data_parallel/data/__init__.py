"""Rows that are split over ranks: datasets, loaders, samplers and shuffles."""
