"""The paper's arithmetic as pure functions of arrays and tensors: shaping -> advantages -> aggregation -> losses."""
