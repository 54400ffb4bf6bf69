"""Sharding of tensors and variables over devices and processes.

`constraints` has the layouts of tensors inside layers, `variables` reads and writes
variables in files.
"""
