"""Options and the checks across them."""

from argparse import Namespace

import pytest

from megatron_dapo.config import Options
from megatron_dapo.config.checks import check_options
from megatron_dapo.types import InputError


def test_defaults_are_the_papers_settings():
    options = Options.from_args()
    assert (options.rollout.rollout_batch_size, options.rollout.n_samples_per_prompt) == (512, 16)
    assert (options.loss.eps_clip, options.loss.eps_clip_high, options.loss.eps_clip_c) == (0.2, 0.28, None)
    assert options.rollout.rollout_max_response_len == 20480 and options.reward.overlong_buffer(20480) == 4096
    assert options.loss.loss_agg_mode == "token-mean" and options.wave_size == 1536
    check_options(options, global_batch_size=512)


def test_parsed_values_and_overrides_reach_their_part():
    options = Options.from_args(Namespace(eps_clip=0.1, unrelated=1), n_samples_per_prompt=8)
    assert options.loss.eps_clip == 0.1 and options.rollout.n_samples_per_prompt == 8


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ({"rollout_batch_size": 100}, ["100", "1600", "8192"]),
        ({"rollout_top_k": 5}, ["--rollout-top-k 5"]),
        ({"icepop_range": [5.0, 0.5]}, ["--icepop-range", "low and a high"]),
        ({"alarm_entropy": [0.1]}, ["--alarm-entropy", "low and a high"]),
        ({"rollout_top_p": 0.9}, ["--rollout-top-p 0.9"]),
        ({"rollout_temperature": 0.0}, ["--rollout-temperature 0.0"]),
        ({"overlong_buffer_len": 30000}, ["30000", "20480"]),
        ({"over_sampling_batch_size": 100}, ["100", "512"]),
        ({"max_num_gen_batches": 0}, ["--max-num-gen-batches 0"]),
        ({"eps_clip": 1.5}, ["--eps-clip 1.5"]),
        ({"eps_clip_c": 0.5}, ["--eps-clip-c 0.5"]),
        ({"rollout_correction": "tis", "old_logprobs": "rollout"}, ["tis", "recompute"]),
        ({"rollout_engine": "sglang"}, ["sglang"]),
        ({"n_samples_per_prompt": 1, "rollout_batch_size": 8192}, ["--n-samples-per-prompt 1"]),
    ],
)
def test_what_does_not_fit_is_named(overrides, names):
    with pytest.raises(InputError) as caught:
        check_options(Options.from_args(**overrides), global_batch_size=512)
    assert all(name in str(caught.value) for name in names) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("cap", "buffer"), [(20480, 4096), (1024, 204), (12, 2), (4, 0), (1, 0)])
def test_the_overlong_buffer_follows_the_response_length(cap, buffer):
    options = Options.from_args(rollout_max_response_len=cap)
    assert options.reward.overlong_buffer(cap) == buffer
    check_options(options, global_batch_size=512)
    assert Options.from_args(overlong_buffer_len=7).reward.overlong_buffer(cap) == 7


def test_an_evaluation_is_not_asked_what_only_training_needs():
    options = Options.from_args(
        overlong_buffer_len=30000,
        rollout_batch_size=100,
        n_samples_per_prompt=1,
        rollout_top_p=0.5,
        over_sampling_batch_size=1,
    )
    check_options(options, global_batch_size=512, training=False)
    with pytest.raises(InputError):
        check_options(options, global_batch_size=512)
