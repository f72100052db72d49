"""The differences between the versions of vLLM that this connector supports.

Each difference has a module, named after what differs.  Each module decides by the features of the running vLLM, never
by its version number.  `contract` checks at the start the names of vLLM that the connector reads while it serves.
"""
