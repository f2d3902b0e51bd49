# run_and_requeue FOLDER COMMAND...: run the command, and if the run in FOLDER is not complete but can
# continue, put the job back into the queue. The same command then continues from the newest checkpoints
# in FOLDER or below it.
#
#   the command ends with                          the job
#   0    complete                                  ends
#   75   stopped by a signal or a time limit,      is requeued; after SIGTERM, which scancel and
#        saved                                     preemption send, Slurm decides
#   76, 128 + N   a rank hung or was killed        runs the command again, MAX_RESTARTS (0) times; then
#                                                  is requeued
#   else an error that would come again            ends with this code
#
# srun itself ends with 1 if it runs again and a node is gone: the job is requeued.
# A start that leaves no newer checkpoint is requeued once. If the next start leaves none either, the job
# ends with the code of the command: it would fail forever. MAX_REQUEUES (100) limits the number of starts.
run_and_requeue() {
    local folder=$1 signal="" early="" command="" restart before code
    shift
    export MOE_PARALLEL_STARTED=${MOE_PARALLEL_STARTED:-$(date +%s)}  # --exit-duration-in-mins counts from here
    # srun passes these signals on to its tasks. One that comes before the command is there waits for it.
    pass_on() {
        signal=$1
        if [ -n "$command" ]; then kill "-$signal" "$command" 2>/dev/null; else early=$signal; fi
    }
    trap 'pass_on USR1' USR1
    trap 'pass_on TERM' TERM
    before=$(newest_checkpoint "$folder")
    for ((restart = 0; ; restart++)); do
        TORCHELASTIC_RESTART_COUNT=$restart "$@" &
        command=$!
        # A shell loses a signal between the start of a process and that of its program.
        [ -z "$early" ] || { sleep 1; kill "-$early" "$command" 2>/dev/null; }
        # A signal ends `wait` early. The last `wait` is for a command that has ended since then.
        while wait "$command"; code=$?; [ "$code" -gt 128 ] && kill -0 "$command" 2>/dev/null; do :; done
        wait "$command"
        code=$?
        command=""
        [ "$code" -eq 76 ] || [ "$code" -gt 128 ] || break
        [ -z "$signal" ] && [ "$restart" -lt "${MAX_RESTARTS:-0}" ] || break
        echo "starting again: restart $((restart + 1)) of $MAX_RESTARTS"
    done

    # The number of one task of an array may be that of the whole array.
    local job=$SLURM_JOB_ID
    [ -z "${SLURM_ARRAY_JOB_ID:-}" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    local unchanged="" mark="$folder/requeued_without_checkpoint.$job"
    [ "$(newest_checkpoint "$folder")" != "$before" ] || unchanged=yes
    if [ "$code" -eq 0 ] || [ -z "$unchanged" ]; then rm -f "$mark"; fi

    if [ "$code" -eq 0 ]; then
        exit 0
    elif [ "$code" -eq 75 ]; then
        [ "$signal" != TERM ] || exit "$code"
    elif [ "$code" -ne 76 ] && [ "$code" -le 128 ] && ! { [ "$code" -eq 1 ] && [ "$restart" -gt 0 ]; }; then
        exit "$code"
    fi
    if [ "${SLURM_RESTART_COUNT:-0}" -ge "${MAX_REQUEUES:-100}" ]; then
        echo "not requeued: MAX_REQUEUES is ${MAX_REQUEUES:-100}"
        exit "$code"
    fi
    if [ -n "$unchanged" ] && [ -e "$mark" ]; then
        rm -f "$mark"
        echo "not requeued: exit code $code, and no new checkpoint in this start and in the one before it"
        exit "$code"
    elif [ -n "$unchanged" ] && ! { mkdir -p "$folder" && touch "$mark"; }; then
        echo "not requeued: exit code $code, no new checkpoint, and $folder cannot be written"
        exit "$code"
    fi
    echo "exit code $code: job $job is requeued"
    # Slurm now ends this script. If it left by itself first, the job could count as failed.
    trap - USR1 TERM
    scontrol requeue "$job" && sleep 60
    exit "$code"
}

newest_checkpoint() {
    find "$1" -maxdepth 4 -name latest_checkpointed_iteration.txt -exec cat {} + 2>/dev/null | sort
}
