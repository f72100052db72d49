"""An endpoint picker: Envoy asks which engine gets a request, and carries the request there itself."""
