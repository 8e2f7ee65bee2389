"""Loss aggregation as a weight a response on one sum, so that no parallel layout needs a denominator of its own."""

from __future__ import annotations

import numpy as np

from megatron_dapo.config import LossOptions
from megatron_dapo.types import FloatArray, IntArray


def sequence_loss_weights(
    mask_tokens_N: IntArray, group_N: IntArray, options: LossOptions, max_response_len: int
) -> FloatArray:
    """Weights w, float64 [N], such that the loss of the optimizer step is sum_i w_i sum_t l_it / sum_i mask_tokens_i.

    token-mean: every token alike (paper equation 12). prompt-mean: mean over prompts of the token mean of their group (the
    paper's equation read literally). seq-mean-token-mean: mean over responses of their token mean (GRPO).
    seq-mean-token-sum-norm: mean over responses of their token sum over a constant (Dr.GRPO). Fully masked responses, and
    groups of only such, weigh 0 and are not counted.
    """
    tokens = np.asarray(mask_tokens_N, dtype=np.float64)
    counted = tokens > 0
    total = tokens.sum()
    if total == 0:
        return np.zeros(len(tokens))
    mode = options.loss_agg_mode
    if mode == "token-mean":
        return counted.astype(np.float64)
    weights = np.zeros(len(tokens))
    if mode == "prompt-mean":
        _, member = np.unique(group_N, return_inverse=True)
        of_group = np.bincount(member, weights=tokens)
        weights[counted] = total / ((of_group > 0).sum() * of_group[member][counted])
    elif mode == "seq-mean-token-mean":
        weights[counted] = total / (counted.sum() * tokens[counted])
    else:
        assert mode == "seq-mean-token-sum-norm", mode
        weights[counted] = total / (counted.sum() * (options.loss_norm_length or max_response_len))
    return weights
