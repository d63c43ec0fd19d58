"""The layers of Bayesian nets, one kind per file."""
