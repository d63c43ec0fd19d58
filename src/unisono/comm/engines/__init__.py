"""What moves and adds tensors: one engine for each kind of network."""
