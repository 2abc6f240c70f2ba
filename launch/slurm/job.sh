# The *.sbatch files in this directory set $launch to the folder `launch` and source this file. `resumable COMMAND...`
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
