"""A hostile campaign: whatever is fed, killed or full, nothing is silently wrong.

`make torture` runs all of it, `make test` a short form (`test_torture.py`). Every part
is a function that draws cases from a seed and enters what became of them in a `Tally`.
"""
