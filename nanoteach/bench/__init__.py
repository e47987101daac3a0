"""`nanoteach bench`: how fast the engine is, beside how fast it could be.

The command imports these modules; nothing else does.
"""
