"""What torch.distributed sees of us, and what we use of torch that torch does not promise."""
