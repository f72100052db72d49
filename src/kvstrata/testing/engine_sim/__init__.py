"""A simulated serving engine: vLLM's scheduler and block pool over a model of time, in virtual time or behind HTTP.

`engine` is the discrete-event core, which knows neither sockets nor clocks; `app` puts one behind vLLM's HTTP
interface in real time.
"""
