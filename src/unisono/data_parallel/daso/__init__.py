"""DASO: gradients averaged inside a node every batch, parameters between nodes every few."""
