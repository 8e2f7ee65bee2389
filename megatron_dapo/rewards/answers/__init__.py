"""Answers to mathematical problems: found in a response, read as typed values, compared by type."""
