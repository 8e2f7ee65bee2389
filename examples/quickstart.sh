#!/usr/bin/env bash
# The whole way in minutes: data, a starting policy, DAPO, a curve.   quickstart.sh [flags for the DAPO run]
# SEED draws the problems, the weights and every sample; OUT is the folder of it all.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
seed=${SEED:-0}
out=${OUT:-runs/quickstart}
export OMP_NUM_THREADS=1
# At this size processes are faster than threads; the results in the README are those of two. nproc counts threads, not
# cores, where OpenMP's variables are set.
processes=$(($(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) > 1 ? 2 : 1))
train() { "$python" -m torch.distributed.run --standalone --nproc-per-node "$processes" -m megatron_dapo train "$@"; }

if [[ ! -f $out/warmup/checkpoints/latest_checkpointed_iteration.txt ]]; then
    echo "== 1. data: short sums from reasoning-gym, and demonstrations of a careless teacher"
    "$python" examples/quickstart_task.py --out "$out/data" --seed "$seed" --tokenizer "$out/tokenizer"
    "$python" tools/record_demonstrations.py --demonstrations "$out/data/warmup.jsonl" --tokenizer-model "$out/tokenizer" \
        --out "$out/demonstrations" --rollouts 10 --batch 3840 --seed "$seed"
    echo "== 2. starting policy: next-token training on the demonstrations"
    train examples/quickstart_warmup.toml --load-rollouts "$out/demonstrations" --run-dir "$out/warmup" --seed "$((seed + 1))"
fi

echo "== 3. DAPO: rewards of +1 and -1 are all it sees"
train examples/quickstart.toml --run-dir "$out/dapo" --seed "$((seed + 1))" --tokenizer-model "$out/tokenizer" \
    --load "$out/warmup/checkpoints" --prompt-data "$out/data/train.jsonl" --eval-prompt-data "$out/data/heldout.jsonl" "$@"

echo "== 4. what came of it"
"$python" tools/plot_run.py "$out/dapo" --out "$out/plot.png"
"$python" examples/quickstart_result.py "$out/dapo"
echo "the curve: $out/plot.png; responses: $python tools/inspect_rollouts.py $out/dapo"
