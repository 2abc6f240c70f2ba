#!/usr/bin/env bash
# A run on several nodes by Open MPI and ssh. From the root of the repository, which all nodes see under the same
# path, as they see the environment, the model, the data and run_dir:
#
#   launch/mpi/several_nodes.sh HOSTFILE --config opt-30b-sst2-lezo [key=value ...]
#
# HOSTFILE has a line for each node, "name slots=4", for 4 ranks there; the first is where the ranks meet. ssh must
# reach each without a password. If the ranks hang at the start, they talk over the wrong network: set
# NCCL_SOCKET_IFNAME (GPUs) or GLOO_SOCKET_IFNAME (CPUs) to the interface that joins the nodes.
#
# kill -USR1 to mpirun, which passes it on, asks the ranks to stop; the same command resumes.
set -euo pipefail
source launch/environment.sh
hostfile=${1:?the file that names the nodes}
export MASTER_PORT=${MASTER_PORT:-$((10000 + RANDOM % 20000))}

# What ssh does not take along.
exports=()
for name in $(compgen -e); do
    case $name in
        PATH | PYTHONPATH | LD_LIBRARY_PATH | MASTER_PORT | OMP_NUM_THREADS | DS_* | HF_* | NCCL_* | GLOO_* | \
            TORCH_* | PYTORCH_* | CUBLAS_* | TRITON_* | NVIDIA_TF32_OVERRIDE | XDG_CACHE_HOME)
            exports+=(-x "$name") ;;
    esac
done

# Open MPI would bind each rank to one core, and all its threads with it.
exec mpirun --hostfile "$hostfile" --bind-to none "${exports[@]}" python launch/train.py "${@:2}"
