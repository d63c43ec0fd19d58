"""Where ranks are started: on this host, under mpiexec, by the scheduler of a cluster."""
