"""What the engines' own caches hold, by the KV events that they publish.

feed.py (sockets, numbers) ─▶ batches.py (decoding) ─▶ blocks.py (one engine's blocks) ─▶ the registry
                   watcher.py (one thread for all feeds)                   knowledge.py (questions of the loop)
"""
