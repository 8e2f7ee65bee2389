# Two commands do all the set-up: `make quickstart` and `make test`. Each makes .venv the first time.

PYTHON := .venv/bin/python
export OMP_NUM_THREADS := 1
STRICT := megatron_dapo/types.py megatron_dapo/config megatron_dapo/algorithm \
	megatron_dapo/data megatron_dapo/rewards megatron_dapo/text_metrics.py megatron_dapo/tracking \
	megatron_dapo/evaluation.py megatron_dapo/eval_record.py megatron_dapo/rollout/engine.py megatron_dapo/rollout/sampler.py \
	megatron_dapo/rollout/budget.py megatron_dapo/rollout/trajectories.py megatron_dapo/rollout/replay.py \
	megatron_dapo/rollout/control.py megatron_dapo/rollout/replies.py megatron_dapo/rollout/streaming.py megatron_dapo/rollout/ahead.py \
	megatron_dapo/rollout/servers.py megatron_dapo/rollout/sglang.py megatron_dapo/rollout/guard.py \
	megatron_dapo/rollout_side.py megatron_dapo/weights/mapping.py megatron_dapo/weights/hf_config.py megatron_dapo/weights/hf_rope.py megatron_dapo/weights/hf_io.py megatron_dapo/weights/hf_folder.py megatron_dapo/weights/hf_export.py \
	megatron_dapo/weights/buckets.py megatron_dapo/weights/fp8.py megatron_dapo/weights/checksum.py \
	megatron_dapo/platform/launcher.py

.PHONY: help quickstart test test-matrix mutants lint bench clean env env-test

help:
	@echo "make quickstart    train a small policy with DAPO on this machine's CPU and draw its learning curve"
	@echo "make test          run the tests"
	@echo "make test-matrix   every parallel layout against the equation in float64, with a table of errors"
	@echo "make mutants       changes one line at a time: the tests named for it must fail (resumable, under an hour)"
	@echo "make lint          ruff, and mypy strict on the pure floors, shellcheck"
	@echo "make bench         ratios against plain PyTorch and transformers, on this machine"
	@echo "make clean         remove caches and runs (not .venv)"

env:
	@bash tools/setup_env.sh quickstart

env-test:
	@bash tools/setup_env.sh test

quickstart: env
	@bash examples/quickstart.sh

test: env-test
	@$(PYTHON) -m pytest --numprocesses 2

test-matrix: env-test
	@DAPO_MATRIX=full $(PYTHON) -m pytest tests/parallel

mutants: env-test
	@$(PYTHON) tests/mutants/run.py

lint: env-test
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy $(STRICT)
	@.venv/bin/shellcheck -x slurm/*.sh tools/*.sh examples/*.sh .ci/run

bench: env-test
	@cd benchmarks && for name in sampling training_step step_overhead packing logprobs conversion publication client overlap; do ../$(PYTHON) -W ignore $$name.py || exit 1; done

clean:
	rm -rf runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path "./.venv/*" -prune -exec rm -rf {} +
