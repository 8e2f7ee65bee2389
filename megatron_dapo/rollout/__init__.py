"""Who generates, and what becomes of it on rank 0.

``engine`` is the protocol and the table of engines, ``embedded`` the one on the training model; ``sampler`` is dynamic sampling,
``collector`` a step's trajectories, ``replay`` recorded rollouts, ``ahead`` generation beside training.
"""
