"""Who failed, who is late, who waits for whom: what ranks learn of each other beside the data."""
