"""What differs between the versions of vLLM that this connector runs in.

One module for each difference, named after what differs.  Each chooses by what the running vLLM has, never by its
number.  `contract` looks up at the start what the connector reads by name while it serves.
"""
