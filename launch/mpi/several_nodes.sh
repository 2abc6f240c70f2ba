#!/usr/bin/env bash
# Run on several nodes with Open MPI and ssh. Start it in the root of the repository. All nodes must see the
# repository, the environment, the model, the data and run_dir under the same paths:
#
#   launch/mpi/several_nodes.sh HOSTFILE --config llama-3.1-8b [key=value ...]
#
# HOSTFILE has a line for each node, such as "name slots=4" for 4 ranks. The ranks meet at the first node. ssh must
# reach every node without a password. Ranks that hang at the start probably use the wrong network: set
# NCCL_SOCKET_IFNAME (GPUs) or GLOO_SOCKET_IFNAME (CPUs) to the interface that connects the nodes.
#
# kill -USR1 PID, with the PID of mpirun, asks the ranks to stop. The same command resumes the run.
set -euo pipefail
launch=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$launch/environment.sh"
hostfile=${1:?the file that names the nodes}
export MASTER_PORT=${MASTER_PORT:-$((10000 + RANDOM % 20000))}

# ssh does not pass environment variables on, so mpirun exports these.
exports=()
for name in $(compgen -e); do
    case $name in
        PATH | PYTHONPATH | LD_LIBRARY_PATH | MASTER_PORT | OMP_NUM_THREADS | DS_* | HF_* | NCCL_* | GLOO_* | \
            TORCH_* | PYTORCH_* | CUBLAS_* | TRITON_* | NVIDIA_TF32_OVERRIDE | XDG_CACHE_HOME)
            exports+=(-x "$name") ;;
    esac
done

# By default, Open MPI binds each rank and all its threads to one core.
exec mpirun --hostfile "$hostfile" --bind-to none "${exports[@]}" python "$launch/train.py" "${@:2}"
