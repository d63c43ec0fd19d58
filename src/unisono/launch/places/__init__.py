"""Where ranks are started: on this host, under mpiexec, by ssh, on Ray, by a scheduler."""
