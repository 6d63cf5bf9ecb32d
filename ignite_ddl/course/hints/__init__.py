"""Hints for guesses that have a reason to be wrong: one module a chapter, functions of what its cells computed."""
