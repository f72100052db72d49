"""The content of the engines' own caches, from the KV events that they publish.

zmq_watcher.py (one thread: sockets, numbers) ─▶ cache.py (an engine's blocks) ─▶ the registry ─▶ knowledge.py (loop)
"""
