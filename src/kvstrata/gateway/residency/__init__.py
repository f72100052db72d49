"""The content of the engines' own caches, from the KV events that they publish.

zmq_watcher.py (thread: sockets, sequence) ─▶ cache.py (an engine's blocks) ─▶ the registry ─▶ knowledge.py (event loop)
"""
