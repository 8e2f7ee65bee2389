#!/usr/bin/env bash
# DAPO on Qwen2.5-32B with the paper's settings: 8 nodes generate, 8 train.
#
#   sbatch slurm/dapo_qwen32b.sh                          from the project's folder
#   sbatch slurm/dapo_qwen32b.sh --lr 5e-7                more flags, for trainer and servers alike (they come last, and win)
#   sbatch --nodes=24 --export=ALL,ROLLOUT_NODES=16 slurm/dapo_qwen32b.sh
#   DRY_RUN=1 bash slurm/dapo_qwen32b.sh                  print every command and do nothing; needs no Slurm
#
# Edit what stands here for your cluster; sbatch's own flags win over it.
#SBATCH --job-name=dapo_qwen32b
#SBATCH --nodes=16
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=5-00:00:00
#SBATCH --output=slurm-%x-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@600
# (the last: ten minutes before the time is over the trainer is told to save and stop)
set -euo pipefail

# --- what to train; every line can be set from the environment ---------------------------------------------------------
: "${RECIPE:=examples/dapo_qwen32b.toml}"
: "${HF_CHECKPOINT:=models/Qwen2.5-32B}" # config, tokenizer and starting weights
: "${PROMPT_DATA:=}"                     # empty: what the recipe names
: "${RUN_DIR:=runs/${SLURM_JOB_NAME:-dapo_qwen32b}}" # the same folder again resumes the run

# --- how the nodes are shared ------------------------------------------------------------------------------------------
: "${GPUS_PER_NODE:=8}"
: "${ROLLOUT_NODES:=8}"    # the last nodes of the job generate, all others train
: "${GPUS_PER_SERVER:=4}"  # tensor-parallel size of a server; a node holds GPUS_PER_NODE / GPUS_PER_SERVER of them
: "${SERVER_PORT:=30000}"  # server i of the job listens on SERVER_PORT + 10 i
: "${SERVER_WAIT_S:=1800}" # the job ends, naming who is missing, where a server takes longer to answer

# --- what is specific to a cluster -------------------------------------------------------------------------------------
: "${SRUN_FLAGS:=}" # for every srun, for example --container-image=... --container-mounts=...
: "${PYTHON:=}"     # empty: .venv/bin/python where it is, else python3
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}" # Megatron wants it for sequence parallelism

# Slurm runs a copy of this file from its spool, so its own place says nothing.
: "${DAPO_HOME:=${SLURM_SUBMIT_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}}"
if [[ ! -f $DAPO_HOME/slurm/common.sh ]]; then
    echo "dapo_qwen32b: no slurm/common.sh in $DAPO_HOME: submit from the project's folder, or set DAPO_HOME to it" >&2
    exit 2
fi
cd "$DAPO_HOME"
# shellcheck source=slurm/common.sh
source slurm/common.sh

split_nodes
check_plan "$@"
start_servers "$@"
wait_for_servers
train "$@"
