"""DAPO on Megatron-LM: the loss and the rollout loop inside Megatron's own training entry point."""

__version__ = "0.1.0"
