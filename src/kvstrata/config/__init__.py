"""Settings of server and client: the model, where values come from, and the names users already know."""
