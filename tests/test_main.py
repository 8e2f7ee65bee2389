"""What a user meets at the command line: help, the plan, and bad input refused in one line with exit code 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import write_task

from megatron_dapo.__main__ import main

EXAMPLES = Path(__file__).parents[1] / "examples"


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """Run a command that must be refused; its one line."""
    assert main([str(a) for a in argv]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("megatron_dapo: error: "), lines
    return lines[0]


def test_help_names_the_commands(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("train", "eval", "plan", "doctor"))


def test_help_lists_every_flag_with_its_default(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--help"])
    assert stopped.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in (
        "--eps-clip-high EPS_CLIP_HIGH Upper clip range: clip-higher. (default: 0.28) Range: a number above 0.",
        "--no-dynamic-sampling",
    ):
        assert words in out
    assert 0 < out.index("--rollout-batch-size") < out.index("--tensor-model-parallel-size")


@pytest.mark.parametrize("word", ["--version", "-V", "version"])
def test_the_version(word, capsys):
    from megatron_dapo import __version__

    assert main([word]) == 0 and capsys.readouterr().out == f"megatron_dapo {__version__}\n"


def test_unknown_command(capsys):
    assert "unknown command 'trian'" in refused(capsys, "trian")


@pytest.mark.parametrize("recipe", sorted(p.name for p in EXAMPLES.glob("*.toml")))
def test_every_shipped_recipe_has_a_plan(recipe, capsys):
    assert main(["plan", str(EXAMPLES / recipe)]) == 0
    out = capsys.readouterr().out
    assert "# ranks:" in out and "# batches" in out and "optimizer steps" in out


@pytest.mark.parametrize("recipe", ["dapo_qwen7b", "dapo_qwen32b"])
def test_shapes_of_shipped_recipes_are_those_of_the_published_models(recipe, tmp_path, capsys):
    published = EXAMPLES.parents[1] / f"shared/data/hf_shapes/qwen25_{recipe.removeprefix('dapo_qwen')}.json"
    if not published.is_file():
        pytest.skip("the published configurations do not lie beside this checkout")
    (tmp_path / "config.json").write_text(json.dumps(json.loads(published.read_text())["config"]))
    assert main(["plan", str(EXAMPLES / f"{recipe}.toml"), "--hf-checkpoint", str(tmp_path)]) == 0
    assert "contradicts" in refused(
        capsys, "plan", EXAMPLES / f"{recipe}.toml", "--hf-checkpoint", tmp_path, "--num-layers", "4"
    )


def test_the_paper_recipe_has_the_papers_numbers(capsys):
    main(["plan", str(EXAMPLES / "dapo_qwen32b.toml")])
    out = capsys.readouterr().out
    for fact in (
        "512 prompts x 16 samples = 8192 responses",
        "8192 = 512 per step x 16 steps per rollout",
        "20 rollouts = 320 optimizer steps = 163840 responses",
        "penalty from 16384 tokens on",
        "1536 prompts per wave, at most 10",
        "eps_clip_high = 0.28",
    ):
        assert fact in out


def test_the_command_line_wins_over_the_recipe(capsys):
    recipe = EXAMPLES / "dapo_qwen32b.toml"
    argv = [
        "--eps-clip-high",
        "0.2",
        "--no-dynamic-sampling",
        "--loss-agg-mode",
        "seq-mean-token-mean",
        "--lr",
        "5e-7",
    ]
    assert main(["plan", str(recipe), *argv]) == 0
    out = capsys.readouterr().out
    for line in (
        "eps_clip_high = 0.2\n",
        "dynamic_sampling = false",
        'loss_agg_mode = "seq-mean-token-mean"',
        "lr = 5e-07",
    ):
        assert line in out


def test_a_typo_in_a_recipe(tmp_path, capsys):
    line = refused(capsys, "train", write_task(tmp_path, rollout_batchsize=8))
    assert "unknown key 'rollout_batchsize'" in line and "did you mean 'rollout_batch_size'" in line


def test_a_switch_that_is_on_by_default_can_be_turned_off_or_says_why_not(tmp_path, capsys):
    recipe = write_task(tmp_path, use_distributed_optimizer=False, dist_ckpt_optim_fully_reshardable=False)
    assert main(["plan", str(recipe)]) == 0
    assert "\nno_use_distributed_optimizer = true" in capsys.readouterr().out
    recipe = write_task(tmp_path, calculate_per_token_loss=False)
    assert "calculate_per_token_loss = false: DAPO's step needs it" in refused(capsys, "plan", recipe)


def test_a_typo_on_the_command_line(tmp_path, capsys):
    line = refused(capsys, "train", write_task(tmp_path), "--rollout-batchsize", "8")
    assert "--rollout-batchsize" in line and "did you mean '--rollout-batch-size'" in line


def test_a_value_of_the_wrong_kind(tmp_path, capsys):
    assert "--loss-agg-mode" in refused(capsys, "train", write_task(tmp_path), "--loss-agg-mode", "token-sum")


def test_a_missing_recipe(capsys):
    assert "absent.toml: no such file" in refused(capsys, "train", "absent.toml")


def test_a_missing_file_of_prompts(tmp_path, capsys):
    line = refused(capsys, "train", write_task(tmp_path, prompt_data=[str(tmp_path / "absent.jsonl")]))
    assert "absent.jsonl" in line


def test_no_prompts_named(tmp_path, capsys):
    assert "--prompt-data is missing" in refused(capsys, "train", write_task(tmp_path, prompt_data=None))


def test_a_row_without_an_answer(tmp_path, capsys):
    rows = [{"question": "1+1=", "answer": "2"}, {"question": "1+2="}]
    line = refused(capsys, "train", write_task(tmp_path, rows))
    assert "problems.jsonl" in line and "2" in line and "answer" in line


def test_an_answer_that_is_no_number(tmp_path, capsys):
    rows = [{"question": "1+1=", "answer": "two"}]
    line = refused(capsys, "train", write_task(tmp_path, rows))
    assert "'two'" in line and "--answer-type any" in line


@pytest.mark.parametrize("answer", ["proof", "notfound", "{'value': 2}", "nan", "True", "\\frac{", "3=7"])
def test_an_answer_that_is_none_is_refused_with_any_too(tmp_path, capsys, answer):
    rows = [{"question": "1+1=", "answer": "2"}, {"question": "1+2=", "answer": answer}]
    for kind in ("any", "number"):
        line = refused(capsys, "train", write_task(tmp_path, rows, answer_type=kind))
        assert "problems.jsonl" in line and "2" in line and repr(answer) in line
        assert "fix the row or remove it" in line and "--answer-type any" not in line


def test_answers_of_other_rewards_are_their_own_business(tmp_path):
    from megatron_dapo.config import RewardOptions
    from megatron_dapo.rewards.registry import reward_of

    auto = RewardOptions()
    assert reward_of("reasoning_gym/coin_flip", auto) != "math" and reward_of("math_dapo", auto) == "math"
    assert reward_of("math_dapo", RewardOptions(reward="my.module:f")) == "my.module:f"


def test_a_prompt_longer_than_the_limit(tmp_path, capsys):
    line = refused(capsys, "train", write_task(tmp_path, [{"question": "1+" * 20 + "1=", "answer": "21"}]))
    assert "42" in line and "16" in line and "--rollout-max-prompt-len" in line


def test_batch_numbers_that_do_not_divide(tmp_path, capsys):
    assert "8 x --n-samples-per-prompt 4 = 32" in refused(capsys, "train", write_task(tmp_path, global_batch_size=10))


def test_ranks_that_do_not_divide(tmp_path, capsys):
    line = refused(capsys, "plan", write_task(tmp_path, tensor_model_parallel_size=2, actor_num_gpus_per_node=3))
    assert "3 processes" in line and "2" in line


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"tensor_model_parallel_size": 4}, ["--tensor-model-parallel-size 4", "--num-query-groups", "2"]),
        ({"tensor_model_parallel_size": 8}, ["--tensor-model-parallel-size 8", "--num-attention-heads 4"]),
        ({"tensor_model_parallel_size": 2, "ffn_hidden_size": 129}, ["--ffn-hidden-size 129"]),
        ({"pipeline_model_parallel_size": 4}, ["pipeline stages: 4", "--num-layers 2"]),
        ({"num_experts": 3, "expert_model_parallel_size": 2}, ["--expert-model-parallel-size 2", "--num-experts 3"]),
        ({"expert_model_parallel_size": 2}, ["--expert-model-parallel-size 2", "no experts"]),
        ({"num_experts": 4, "expert_model_parallel_size": 4, "pipeline_model_parallel_size": 2, "actor_num_nodes": 1,
          "actor_num_gpus_per_node": 4},
         ["= 8", "processes, 4"]),
        ({"log_memory_interval": 3}, ["Megatron refuses", "args.log_memory_interval % args.log_interval", "arguments.py:"]),
        ({"log_memory_interval": 3, "log_interval": 0}, ["Megatron refuses", "ZeroDivisionError", "arguments.py:"]),
        ({"min_lr": 1e-2}, ["--min-lr 0.01", "--lr 0.001"]),
        ({"lr_decay_iters": 4, "lr_warmup_rollouts": 2}, ["--lr-decay-iters 4", "= 4 optimizer steps"]),
        ({"lr_decay_style": "WSD"}, ["--lr-wsd-decay-iters"]),
        ({"use_checkpoint_opt_param_scheduler": True}, ["--use-checkpoint-opt-param-scheduler"]),
        ({"lr": -1.0}, ["--lr -1.0", "at least 0"]),
        ({"lr": float("nan")}, ["--lr nan"]),
        ({"clip_grad": float("inf")}, ["--clip-grad inf"]),
        ({"seed": 0}, ["--seed 0", "at least 1"]),
        ({"tensor_model_parallel_size": 0}, ["--tensor-model-parallel-size 0"]),
        ({"save_interval": -1}, ["--save-interval -1"]),
        ({"tis_clip": -1.0}, ["--tis-clip -1.0", "above 0"]),
        ({"overlong_penalty_factor": -1}, ["--overlong-penalty-factor -1", "at least 0"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_plan_refuses_what_train_would(tmp_path, capsys, overrides, words):
    settings = {"actor_num_gpus_per_node": 8, "actor_num_nodes": 2, "global_batch_size": 16, **overrides}
    line = refused(capsys, "plan", write_task(tmp_path, **settings))
    assert all(word in line for word in words), line


def test_a_division_that_fails_is_named_before_what_follows_from_it(tmp_path, capsys):
    task = write_task(tmp_path, tensor_model_parallel_size=3, sequence_parallel=True, max_tokens_per_gpu=20)
    assert "tensor x pipeline x context = 3" in refused(capsys, "plan", task)


def test_the_overlong_buffer_follows_a_short_response(tmp_path, capsys):
    assert main(["plan", str(write_task(tmp_path, overlong_buffer_len=None))]) == 0
    out = capsys.readouterr().out
    assert "penalty from 10 tokens on" in out and "overlong_buffer_len" in out.partition("# not set:")[2]


def test_a_tokenizer_with_more_ids_than_the_model(tmp_path, capsys):
    assert "--vocab-size" in refused(capsys, "train", write_task(tmp_path, vocab_size=16))


def test_a_tokenizer_that_is_not_there(tmp_path, capsys):
    assert "absent" in refused(capsys, "train", write_task(tmp_path, tokenizer_model=str(tmp_path / "absent")))


def test_load_without_a_checkpoint(tmp_path, capsys):
    assert "no checkpoint there" in refused(capsys, "train", write_task(tmp_path, load=str(tmp_path)))


def test_eval_without_a_checkpoint(tmp_path, capsys):
    recipe = write_task(
        tmp_path, eval_prompt_data=[str(tmp_path / "problems.jsonl")], overlong_buffer_len=4096, global_batch_size=7,
        max_tokens_per_gpu=3, rollout_top_p=0.5,
    )  # fmt: skip
    assert "no checkpoint there to evaluate" in refused(capsys, "eval", recipe)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--fp8-format", "e4m3"], "--transformer-impl local"),
        (["--fp8-format", "e4m3", "--transformer-impl", "transformer_engine"], "--bf16"),
        (
            ["--fp8-format", "e4m3", "--transformer-impl", "transformer_engine", "--bf16"],
            "Transformer Engine",
        ),
        (["--use-precision-aware-optimizer"], "Transformer Engine"),
        (["--fp16"], "--bf16"),
        (["--max-tokens-per-gpu", "10"], "--max-tokens-per-gpu 10"),
    ],
)
def test_what_would_be_silently_ignored_is_refused(tmp_path, capsys, flags, words):
    if "Transformer" in words and _transformer_engine_is_here():
        pytest.skip("Transformer Engine is installed: nothing to refuse")
    assert words in refused(capsys, "train", write_task(tmp_path), *flags)


TE = ["--transformer-impl", "transformer_engine", "--bf16"]


@pytest.mark.parametrize("form", ["e4m3", "hybrid"])
@pytest.mark.parametrize(("recipe", "align"), [("delayed", 16), ("tensorwise", 16), ("blockwise", 16), ("mxfp8", 32)])
def test_accepted_fp8_pairs_pad_sequences_to_what_the_kernels_want(tmp_path, capsys, form, recipe, align):
    task = write_task(tmp_path, tensor_model_parallel_size=2, context_parallel_size=2, actor_num_gpus_per_node=4)
    flags = [*TE, "--sequence-parallel", "--fp8-format", form, "--fp8-recipe", recipe]
    assert main(["plan", str(task), *flags]) == 0
    assert f"padded to {2 * 2 * 2 * align}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--fp8-recipe", "blockwise", "--fp8-param-gather", "--no-use-distributed-optimizer"],
            "distributed optimizer",
        ),
        (["--fp8-recipe", "delayed", "--first-last-layers-bf16"], "first"),
        (["--fp8-recipe", "blockwise", "--fp4-format", "e2m1"], "fp4"),
    ],
)
def test_fp8_flags_that_do_not_go_together(tmp_path, capsys, flags, words):
    assert words in refused(capsys, "plan", write_task(tmp_path), *TE, "--fp8-format", "e4m3", *flags).lower()


def _transformer_engine_is_here() -> bool:
    from megatron_dapo import compat

    return compat.has_transformer_engine()


def test_a_checkpoint_of_another_shape(tmp_path):
    """Train one step, then load its checkpoint into a wider model: refused before anything is built."""
    first = write_task(tmp_path / "a", num_rollout=1)
    second = write_task(tmp_path / "b", load=str(tmp_path / "a/run/checkpoints"), hidden_size=32, kv_channels=8)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    trained = subprocess.run(
        [sys.executable, "-m", "megatron_dapo", "train", first],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert trained.returncode == 0, trained.stderr[-2000:]
    assert json.loads((tmp_path / "a/run/metrics.jsonl").read_text().splitlines()[0])["step"] == 1
    refused_run = subprocess.run(
        [sys.executable, "-m", "megatron_dapo", "train", second],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert refused_run.returncode == 2
    lines = [line for line in refused_run.stderr.splitlines() if "megatron_dapo: error" in line]
    assert (
        len(lines) == 1
        and "--hidden-size 64" in lines[0]
        and "32" in lines[0]
        and "Traceback" not in refused_run.stderr
    )


def test_prompts_in_a_form_that_the_verifier_does_not_read_are_told_before_anything_is_built(tmp_path, capsys):
    rows = [{"question": f"{n}+1= Put it within \\boxed{{}}.", "answer": str(n + 1)} for n in range(3)]
    recipe = write_task(tmp_path, rows, rollout_max_prompt_len=64, vocab_size=64)
    from megatron_dapo.data.problems import load_problems
    from megatron_dapo.training.arguments import parse

    for mode, told in (("verl_compat", True), ("strict", False)):
        load_problems(*parse([str(recipe), "--verifier-mode", mode]))
        assert ("warning: 3 of 3 prompts ask for \\boxed{}" in capsys.readouterr().out) == told


@pytest.mark.parametrize("name", ["a/b", "..", ".", "", "step_000004", "step_4-2", "two words", "-x", "x" * 200])
def test_names_that_are_no_evaluations_are_refused(tmp_path, capsys, name):
    recipe = write_task(tmp_path, eval_prompt_data=[str(tmp_path / "problems.jsonl")])
    assert "--eval-name" in refused(capsys, "eval", recipe, f"--eval-name={name}")


def test_another_evaluations_name_is_refused_before_a_model_is_loaded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("megatron_dapo.training.checkpoint._check_weights", lambda *_: None)  # a name is enough here
    recipe = write_task(tmp_path, eval_prompt_data=[str(tmp_path / "problems.jsonl")])
    for path, text in (("checkpoints/latest_checkpointed_iteration.txt", "2"), ("eval/mine/report.json", "{}")):
        (tmp_path / "run" / path).parent.mkdir(parents=True)
        (tmp_path / "run" / path).write_text(text)
    assert "--eval-name mine" in refused(capsys, "eval", recipe, "--eval-name", "mine")
    assert not (tmp_path / "run/logs").exists()
    assert "--eval-name mine" in refused(capsys, "train", recipe, "--eval-name", "mine")
