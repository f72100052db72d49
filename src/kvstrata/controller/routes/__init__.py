"""Routes of the controller's HTTP API, by what they are about."""
