"""What the engines' own caches hold, by the KV events that they publish.

feed.py (sockets, numbers) ─▶ batches.py (decoding) ─▶ cache.py (one engine's blocks) ─▶ the registry
                   zmq_watcher.py (one thread for all feeds)               knowledge.py (questions of the loop)
"""
