"""From files to prompts with token ids, and from trajectories to packed micro-batches.

``problems`` reads all that a run needs before a model is built; ``prompts`` is the cursor that a resume goes on with; ``rows``,
``chat``, ``text``, ``labels`` and ``length`` are the parts of reading a row; ``packing`` fills micro-batches.
"""
