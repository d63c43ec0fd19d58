#!/bin/sh
# One script, unchanged, under every starter that this machine has:
#
#   sh examples/launch_everywhere.sh [script.py]
#
# Each joins, or starts, a world of two ranks. A starter that is not installed is left out.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
script=${1:-$here/launch_hello.py}
python=${PYTHON:-python}
export OMP_NUM_THREADS=1

under() {
  echo "== $1"
  shift
  "$@"
}

under "plain python, which starts the ranks" "$python" "$script" --ranks 2
under "unisono run" "$python" -m unisono run --ranks 2 "$script"
under "torchrun" "$python" -m torch.distributed.run --standalone --nproc-per-node 2 "$script"
if "$python" -c "import mpi4py" 2>/dev/null && mpiexec=$(command -v "${MPIEXEC:-mpiexec}"); then
  under "mpiexec" "$mpiexec" -n 2 "$python" "$script"
fi
if [ -n "${SLURM_JOB_ID:-}" ]; then
  under "srun" srun --ntasks 2 "$python" "$script"
fi
