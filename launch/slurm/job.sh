# Sourced by the *.sbatch beside it. resumable COMMAND... runs a command that a stopped job continues later:
#
#   Time limit, or scancel --signal=USR1 --batch JOB. The batch script gets USR1 and passes it on to the ranks,
#     which agree on a last step; then the job goes back into the queue.
#   Preemption. Slurm tells the ranks by SIGTERM, if it gives them time to stop (GraceTime), and puts the job back
#     into the queue when it kills it. Ranks that stop in time end the job before that: then it is done here.
#   scontrol requeue, a node that fails. Slurm itself puts the job back into the queue (--requeue).
#
# The same command resumes a run from its journal, so a job that starts again goes on where it was; the results
# are those of an undisturbed run. A job that ends otherwise, well or not, stays ended.

source launch/environment.sh
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not take it from the job (Slurm 22.05 and later)

resumable() {
    local code=0 stopped=false
    # Without --batch scancel signals the steps, which are the ranks.
    trap 'stopped=true; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1
    "$@" &
    wait $! || code=$?
    if $stopped; then
        wait $! || true  # the signal ended the first wait, not the command
    fi
    if $stopped || preempted; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
    return "$code"
}

# Whether Slurm has preempted the job since it started (last): both times as YYYY-MM-DDTHH:MM:SS.
preempted() {
    local started since
    read -r started since < <(squeue --noheader --job "$SLURM_JOB_ID" --Format "StartTime:24,PreemptTime:24")
    [[ $since == [0-9]* && ! $since < $started ]]
}
