"""Hugging Face checkpoints: what their config says, which tensor is whose, their files, and a model's shards put together.

``mapping`` is the table of names and shapes; ``hf_io`` reads and writes; ``gather`` turns shards into whole tensors.
"""
