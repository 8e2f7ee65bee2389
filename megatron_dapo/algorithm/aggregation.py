"""Loss aggregation as weights on one sum: no parallel layout needs a denominator of its own."""

from __future__ import annotations

import numpy as np

from megatron_dapo.config import LossOptions
from megatron_dapo.types import FloatArray, InputError, IntArray


def sequence_loss_weights(
    mask_tokens_N: IntArray, group_N: IntArray, options: LossOptions, max_response_len: int
) -> FloatArray:
    """Weights w, float64 [N]: the loss of the optimizer step is sum_i w_i sum_t l_it / sum_i mask_tokens_i.

    ``mask_tokens_N`` counts the unmasked tokens of each response of the whole step, over all ranks. Modes:
    token-mean, every token alike (paper equation 12, over the step); prompt-mean, the mean over prompts of
    their group's token mean (the equation read literally, one prompt at a time); seq-mean-token-mean, the
    mean over responses of their token mean (GRPO, arXiv 2402.03300); seq-mean-token-sum-norm, the mean over
    responses of their token sum over a constant (Dr.GRPO, arXiv 2503.20783).

    Fully masked responses, and groups of only such, weigh 0 and are not counted. A step of only such is all
    zeros, and the caller skips it.

    Raises:
        InputError: ``loss_norm_length`` is not above 0.
    """
    length = max_response_len if options.loss_norm_length is None else options.loss_norm_length
    if length <= 0:
        raise InputError(f"--loss-norm-length {length} must be above 0")
    tokens = np.asarray(mask_tokens_N, dtype=np.float64)
    counted = tokens > 0
    weights = np.zeros(len(tokens))
    if not counted.any():
        return weights
    mode, total, responses = options.loss_agg_mode, tokens.sum(), counted.sum()
    if mode == "token-mean":
        weights[counted] = 1.0
    elif mode == "prompt-mean":
        _, member = np.unique(group_N, return_inverse=True)
        of_group = np.bincount(member, weights=tokens)
        weights[counted] = total / ((of_group > 0).sum() * of_group[member][counted])
    elif mode == "seq-mean-token-mean":
        weights[counted] = total / (responses * tokens[counted])
    else:
        assert mode == "seq-mean-token-sum-norm", mode
        weights[counted] = total / (responses * length)
    return weights
