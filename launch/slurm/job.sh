# Sourced by the *.sbatch beside it. resumable COMMAND... runs a command that a stopped job continues later:
#
#   Time limit, or scancel --signal=USR1 --batch JOB. The batch script gets USR1 and passes it on to the ranks,
#     which agree on a last step; then the job goes back into the queue.
#   Preemption, scontrol requeue, a node that fails. Slurm itself puts the job back into the queue (--requeue).
#
# The same command resumes a run from its journal, so a job that starts again goes on where it was; the results
# are those of an undisturbed run. A job that ends otherwise, well or not, stays ended.

export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not take it from the job (Slurm 22.05 and later)

resumable() {
    local code=0 stopped=false
    # Without --batch scancel signals the steps, which are the ranks.
    trap 'stopped=true; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1
    "$@" &
    wait $! || code=$?
    if $stopped; then
        wait $! || true  # the signal ended the first wait, not the command
        scontrol requeue "$SLURM_JOB_ID"
    fi
    return "$code"
}
