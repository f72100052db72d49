"""An endpoint picker: Envoy asks which engine gets a request, then forwards the request itself."""
