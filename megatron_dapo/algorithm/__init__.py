"""The paper as pure functions on tensors: no options but their own, no ranks, no files.

``filtering`` (which groups carry a signal), ``shaping`` (overlong responses), ``advantages``, ``losses`` (decoupled clip and
others, and the corrections for an engine's log-probs), ``aggregation`` (token mean and others).
"""
