"""Jobs on a SLURM cluster: the batch script, its submission, the driver inside, the handle.

What ranks on other hosts have in common with MPI's (agents, supervisor, files) is not here.
"""
