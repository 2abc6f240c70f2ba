#!/usr/bin/env bash
# Run on this machine with Open MPI. The first argument is the number of ranks. From the root of the repository:
#
#   launch/mpi/one_node.sh 2 --config llama-3.1-8b [key=value ...]
#
# kill -USR1 PID, with the PID of mpirun, asks the ranks to stop. The same command resumes the run.
set -euo pipefail
launch=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$launch/environment.sh"
num_ranks=${1:?the number of ranks}
export MASTER_PORT=${MASTER_PORT:-$((10000 + RANDOM % 20000))}  # where the ranks meet, on the first rank's node

# By default, Open MPI binds each rank and all its threads to one core.
exec mpirun --bind-to none -np "$num_ranks" python "$launch/train.py" "${@:2}"
