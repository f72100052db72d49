"""The choice of a request's engine: pure functions of measured rates, the gateway's queues and the known cached KV."""
