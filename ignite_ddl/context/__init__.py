"""Context parallel: each rank holds a part of every sequence."""
