"""Jobs on a SLURM cluster, by submitit: what it submits, what it runs in each task, the handle."""
