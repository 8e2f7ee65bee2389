"""The commands of ``python -m megatron_dapo`` beside ``train``: ``evaluate``, ``serve``, ``plan``, ``doctor``."""
