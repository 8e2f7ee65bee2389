"""Everything that knows Megatron's training: arguments, model, micro-batches, log-probs, the step, checkpoints, resuming.

``setup`` builds a ``step.Trainer``; ``checkpoint`` saves and loads it; ``probe`` is what its weights say of a fixed sequence.
"""
