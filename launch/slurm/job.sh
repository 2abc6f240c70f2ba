# The *.sbatch files in this directory set $launch to the folder `launch` and source this file, which takes the options
# for containers off their arguments. "${ranks[@]}" then starts a Python program on all ranks. `resumable COMMAND...`
# runs a command and puts the job back into the queue if it was stopped:
#
#   Time limit, or scancel --signal=USR1 --batch JOB: the batch script receives USR1 and passes it on to the ranks.
#     The ranks agree on a last step. Then this script requeues the job.
#   Preemption: if the partition has a GraceTime, Slurm sends SIGTERM to the ranks. Slurm requeues a job that it
#     kills. If the ranks stop in time, the job ends before that, and this script requeues it.
#   scontrol requeue, or a node failure: Slurm requeues the job itself (--requeue).
#
# The same command resumes a run from its journal, so the results are those of an uninterrupted run. A job that
# succeeds or fails for another reason is not requeued.

source "$launch/environment.sh"
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # since Slurm 22.05, srun does not inherit it from the job

# The ranks run in a container if the first arguments ask for one:
#
#   --container-image IMAGE            a file *.sif runs in Apptainer; any other image, such as lezo_ds.sqsh, in pyxis
#   --container-mounts SOURCE:TARGET   more folders that the container sees, separated by commas; it always sees the
#                                      working directory and the folder `launch`
image='' mounts=$PWD:$PWD,$(realpath "$launch"):$(realpath "$launch")
while [[ ${1:-} == --container-* ]]; do
    [[ $1 == *=* ]] || set -- "$1=${2:?"the value of $1 is missing"}" "${@:3}"
    case $1 in
        --container-image=*) image=${1#*=} ;;
        --container-mounts=*) mounts+=,${1#*=} ;;
        *) echo "error: unknown option $1; expected: --container-image or --container-mounts" >&2; exit 2 ;;
    esac
    shift
done

[[ ! -f $image ]] || image=$(realpath "$image")  # pyxis takes a plain name for one of a registry

# If one rank dies, --kill-on-bad-exit ends the others. There is no --gpus-per-task, because a rank selects its GPU
# among all GPUs of its node.
ranks=(srun --kill-on-bad-exit=1)
case $image in
    '') ranks+=(python) ;;
    *.sif) ranks+=(apptainer exec --nv --bind "$mounts" --pwd "$PWD" "$image" python) ;;
    *) ranks+=(--container-image="$image" --container-mounts="$mounts" --container-workdir="$PWD" python) ;;
esac

resumable() {
    local code=0 stopped=false
    # Without --batch scancel signals the steps, which are the ranks.
    trap 'stopped=true; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1
    "$@" &
    wait $! || code=$?
    if $stopped; then
        wait $! || true  # the signal ended the first wait, but not the command
    fi
    if $stopped || preempted; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
    return "$code"
}

# Succeeds if Slurm has preempted the job since its last start. Both times look like YYYY-MM-DDTHH:MM:SS.
preempted() {
    local started since
    read -r started since < <(squeue --noheader --job "$SLURM_JOB_ID" --Format "StartTime:24,PreemptTime:24")
    [[ $since == [0-9]* && ! $since < $started ]]
}
