#!/usr/bin/env bash
# A run on this machine by Open MPI, so many ranks. From the root of the repository:
#
#   launch/mpi/one_node.sh 2 --config opt-13b-sst2-lezo [key=value ...]
#
# kill -USR1 to mpirun, which passes it on, asks the ranks to stop; the same command resumes.
set -euo pipefail
source launch/environment.sh
num_ranks=${1:?the number of ranks}
export MASTER_PORT=${MASTER_PORT:-$((10000 + RANDOM % 20000))}  # where the ranks meet, on the first one's node

# Open MPI would bind each rank to one core, and all its threads with it.
exec mpirun --bind-to none -np "$num_ranks" python launch/train.py "${@:2}"
