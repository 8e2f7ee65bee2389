"""Processes among each other: who this one is (``launcher``) and what travels between them (``collectives``)."""
