# Two commands do all the set-up: `make quickstart` and `make test`. Each makes .venv the first time.

PYTHON := .venv/bin/python
export OMP_NUM_THREADS := 1

.PHONY: help quickstart test test-matrix mutants lint bench clean env env-test

help:
	@echo "make quickstart    train a small policy with DAPO on this machine's CPU and draw its learning curve"
	@echo "make test          run the tests"
	@echo "make test-matrix   every parallel layout against the equation in float64, with a table of errors"
	@echo "make mutants       changes one line at a time: the tests named for it must fail (resumable, under an hour)"
	@echo "make lint          ruff, and mypy strict on the whole package, shellcheck"
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
	@.venv/bin/mypy megatron_dapo
	@.venv/bin/shellcheck -x slurm/*.sh tools/*.sh examples/*.sh .ci/run

bench: env-test
	@cd benchmarks && for name in sampling training_step step_overhead packing logprobs conversion publication client overlap; do ../$(PYTHON) -W ignore $$name.py || exit 1; done

clean:
	rm -rf runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path "./.venv/*" -prune -exec rm -rf {} +
