"""Mixtures of experts: which experts a token visits, how it gets there, and what keeps experts equally busy."""
