"""What torch's own tests of its pipelining assert, with ranks as SPMD worlds.

A package, since its files are called as upstream's are and others may be too.
"""
