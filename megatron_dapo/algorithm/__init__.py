"""The paper's arithmetic, as pure functions: shaping -> advantages -> aggregation -> losses."""
