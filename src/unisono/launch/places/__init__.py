"""Where ranks are started: on this host, under mpiexec, on Ray, by a scheduler."""
