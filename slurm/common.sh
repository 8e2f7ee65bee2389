# shellcheck shell=bash
# The parts of a Slurm job: split its nodes, start servers in steps of their own, wait for them, train. Sourced by the
# scripts beside it, which set the names in capitals. Processes are ended by the ids that this shell got when it started
# them, never by name: other jobs may share the node.

say() { echo "[$(date '+%F %T')] $*"; }
die() {
    say "error: $*" >&2
    exit 2
}

DRY_RUN=${DRY_RUN:-}
if [[ $DRY_RUN == 0 ]]; then DRY_RUN=; fi
if [[ -z $PYTHON ]]; then
    PYTHON=python3
    if [[ -x .venv/bin/python ]]; then PYTHON=$PWD/.venv/bin/python; fi
fi
read -ra SRUN <<<"srun $SRUN_FLAGS"
# a folder per job and restart: two jobs of one run never write into one file
LOGS=$RUN_DIR/logs/${SLURM_JOB_ID:-JOB}${SLURM_RESTART_COUNT:+.$SLURM_RESTART_COUNT}

SERVER_URLS=() # all servers, in the order of their ports
SERVER_OF=()   # for each, the index of its node in ROLLOUT
SERVER_PIDS=() # one srun per rollout node
TRAINER_PID=

# Which nodes generate (ROLLOUT) and which train (TRAINER), and where the servers will listen.
split_nodes() {
    local nodes
    if [[ -n ${SLURM_JOB_NODELIST:-} ]]; then
        mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    elif [[ -n $DRY_RUN ]]; then
        mapfile -t nodes < <(seq -f 'node-%g' 0 "$((${NODES:-16} - 1))")
    else
        die "this is no Slurm job: submit it with sbatch, or look at it with DRY_RUN=1"
    fi
    local trainers=$((${#nodes[@]} - ROLLOUT_NODES))
    ((ROLLOUT_NODES >= 1 && trainers >= 1)) ||
        die "ROLLOUT_NODES=$ROLLOUT_NODES of ${#nodes[@]} nodes: give at least one node to generation and one to training"
    ((GPUS_PER_NODE % GPUS_PER_SERVER == 0)) ||
        die "GPUS_PER_SERVER=$GPUS_PER_SERVER does not divide GPUS_PER_NODE=$GPUS_PER_NODE: a server lives on one node"
    TRAINER=("${nodes[@]:0:trainers}")
    ROLLOUT=("${nodes[@]:trainers}")
    say "training on ${TRAINER[*]}; generating on ${ROLLOUT[*]}; logs in $LOGS"
    local index server address
    for index in "${!ROLLOUT[@]}"; do
        address=$(address_of "${ROLLOUT[index]}")
        for ((server = 0; server < GPUS_PER_NODE / GPUS_PER_SERVER; server++)); do
            SERVER_URLS+=("http://$address:$((SERVER_PORT + 10 * ${#SERVER_URLS[@]}))")
            SERVER_OF+=("$index")
        done
    done
    if [[ -n $DRY_RUN ]]; then return; fi
    mkdir -p "$LOGS"
    trap stop EXIT
    # Slurm's warning goes to this shell alone. The trainer saves and ends; then train() returns and so does the job.
    trap 'say "told to stop: the trainer saves and ends"; signal USR1 "$TRAINER_PID"; [[ -n $TRAINER_PID ]] || exit 143' TERM INT
}

# The address under which Slurm itself reaches a node.
address_of() {
    local line=
    if [[ -z $DRY_RUN ]]; then line=$(scontrol --oneliner show node "$1" | grep -o 'NodeAddr=[^ ]*') || true; fi
    line=${line#NodeAddr=}
    echo "${line:-$1}"
}

# Print a command; run it in the background too, unless this is a dry run. Its process id: LAST_PID.
launch() {
    printf '+'
    printf ' %q' "$@"
    echo
    if [[ -n $DRY_RUN ]]; then return; fi
    "$@" &
    LAST_PID=$!
}

# What the trainer is told, as words in FLAGS; the caller's own come last and win.
trainer_flags() {
    FLAGS=("$RECIPE" --hf-checkpoint "$HF_CHECKPOINT" --tokenizer-model "$HF_CHECKPOINT" --load "${LOAD:-$HF_CHECKPOINT}"
        --run-dir "$RUN_DIR" --actor-num-nodes "${#TRAINER[@]}" --actor-num-gpus-per-node "$GPUS_PER_NODE"
        --rollout-engine sglang --rollout-num-gpus-per-engine "$GPUS_PER_SERVER" --rollout-server-urls "${SERVER_URLS[@]}")
    if [[ -n $PROMPT_DATA ]]; then
        local files
        read -ra files <<<"$PROMPT_DATA"
        FLAGS+=(--prompt-data "${files[@]}")
    fi
    FLAGS+=("$@")
}

# Have the recipe and every flag checked in seconds, before a checkpoint is read into hundreds of GPUs.
check_plan() {
    local FLAGS
    trainer_flags "$@"
    launch "${SRUN[@]}" --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="${TRAINER[0]}" --output="$LOGS/plan.log" \
        "$PYTHON" -m megatron_dapo plan "${FLAGS[@]}"
    if [[ -n $DRY_RUN ]]; then return; fi
    wait "$LAST_PID" || die "the plan is refused; $LOGS/plan.log ends with: $(tail -n 3 "$LOGS/plan.log" 2>&1)"
}

# One step per rollout node, each with as many servers as fit its GPUs: a node that fails takes no other along.
start_servers() {
    local per_node=$((GPUS_PER_NODE / GPUS_PER_SERVER)) index
    for index in "${!ROLLOUT[@]}"; do
        launch "${SRUN[@]}" --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="${ROLLOUT[index]}" \
            --cpus-per-task="$(cpus_for 1)" --output="$LOGS/servers_$index.log" \
            "$PYTHON" -m megatron_dapo serve "$RECIPE" --hf-checkpoint "$HF_CHECKPOINT" --run-dir "$LOGS/servers_$index" \
            --rollout-num-servers "$per_node" --rollout-num-gpus-per-engine "$GPUS_PER_SERVER" --rollout-server-host 0.0.0.0 \
            --rollout-server-port "${SERVER_URLS[per_node * index]##*:}" --server-start-timeout-s "$SERVER_WAIT_S" "$@"
        SERVER_PIDS+=("${LAST_PID:-}")
    done
}

# Return when every server answers /health; end the job, naming the missing ones, where one does not in time.
wait_for_servers() {
    say "waiting for ${#SERVER_URLS[@]} servers, at most $SERVER_WAIT_S s: ${SERVER_URLS[*]}"
    if [[ -n $DRY_RUN ]]; then return; fi
    local deadline=$((SECONDS + SERVER_WAIT_S)) missing=("${!SERVER_URLS[@]}") still number node
    while :; do
        still=()
        for number in "${missing[@]}"; do
            if is_healthy "${SERVER_URLS[number]}"; then continue; fi
            node=${SERVER_OF[number]}
            kill -0 "${SERVER_PIDS[node]}" 2>/dev/null ||
                die "the servers on ${ROLLOUT[node]} ended before they were up; $LOGS/servers_$node.log ends with: $(tail -n 5 "$LOGS/servers_$node.log" 2>&1)"
            still+=("$number")
        done
        missing=(${still[@]+"${still[@]}"})
        if ((${#missing[@]} == 0)); then break; fi
        if ((SECONDS > deadline)); then
            for number in "${missing[@]}"; do
                say "no answer: ${SERVER_URLS[number]} on ${ROLLOUT[SERVER_OF[number]]}, its log: $LOGS/servers_${SERVER_OF[number]}"
            done
            die "${#missing[@]} of ${#SERVER_URLS[@]} servers are not up after $SERVER_WAIT_S s; raise SERVER_WAIT_S if they are only slow"
        fi
        sleep 1
    done
    say "all servers answer"
}

# True where GET URL/health is answered with 200; bash alone, for a node may lack curl.
is_healthy() {
    local host=${1#http://}
    # shellcheck disable=SC2016  # the inner shell expands them
    timeout 30 bash -c '
        exec 3<>"/dev/tcp/$1/$2" && printf "GET /health HTTP/1.0\r\nHost: $1\r\n\r\n" >&3 && read -r status <&3 && [[ $status == *" 200 "* ]]
    ' _ "${host%:*}" "${host##*:}" 2>/dev/null
}

# One task per GPU on the trainer's nodes; its status is the job's. One rank that dies ends the step at once.
train() {
    MASTER_ADDR=$(address_of "${TRAINER[0]}")
    export MASTER_ADDR # the tasks agree on MASTER_PORT by themselves, where it is not set
    local FLAGS nodes
    trainer_flags "$@"
    nodes=$(IFS=,; echo "${TRAINER[*]}")
    launch "${SRUN[@]}" --nodes="${#TRAINER[@]}" --ntasks="$((${#TRAINER[@]} * GPUS_PER_NODE))" --ntasks-per-node="$GPUS_PER_NODE" \
        --nodelist="$nodes" --cpus-per-task="$(cpus_for "$GPUS_PER_NODE")" --gpu-bind=none --kill-on-bad-exit=1 \
        --output="$LOGS/train_%t.log" "$PYTHON" -m megatron_dapo train "${FLAGS[@]}"
    if [[ -n $DRY_RUN ]]; then return; fi
    TRAINER_PID=$LAST_PID
    say "training; follow it with: tail -f $LOGS/train_0.log"
    local status
    while :; do # a signal that we pass on interrupts wait
        status=0
        wait "$TRAINER_PID" || status=$?
        kill -0 "$TRAINER_PID" 2>/dev/null || break
    done
    TRAINER_PID=
    ((status == 0)) || say "the trainer ended with status $status; rank 0 said last: $(tail -n 5 "$LOGS/train_0.log" 2>&1)"
    say "done"
    return "$status"
}

# Processors for each of $1 tasks on a node: an even share, and an even number, for cores are handed out whole.
cpus_for() {
    local each=$((${CPUS_PER_NODE:-${SLURM_CPUS_ON_NODE:-$1}} / $1))
    if ((each > 1)); then each=$((each - each % 2)); fi
    echo "$((each > 0 ? each : 1))"
}

# A signal for the steps of these sruns; srun passes it on to its tasks. To be asked to stop they need USR1: srun answers
# TERM by killing its step at once.
signal() {
    local name=$1 pid
    shift
    for pid in "$@"; do
        if [[ -n $pid ]]; then kill -"$name" "$pid" 2>/dev/null || true; fi
    done
}

# End what still runs, whichever way the job ends.
stop() {
    trap - EXIT
    local pids=(${TRAINER_PID:+"$TRAINER_PID"} ${SERVER_PIDS[@]+"${SERVER_PIDS[@]}"}) pid deadline=$((SECONDS + 30))
    signal USR1 ${pids[@]+"${pids[@]}"}
    for pid in ${pids[@]+"${pids[@]}"}; do
        while kill -0 "$pid" 2>/dev/null && ((SECONDS < deadline)); do sleep 0.2; done
    done
    signal KILL ${pids[@]+"${pids[@]}"}
}
