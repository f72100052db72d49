"""What gateways before the same engines tell each other.

    Choosing ─▶ Teller ─▶ frames ─▶ PUSH to each other gateway ─▶ PULL ─▶ Others ─▶ Fleet's queues, Prefixes

No request waits for any of it.  A gateway that is told nothing knows what went through itself, as one gateway does.
"""
