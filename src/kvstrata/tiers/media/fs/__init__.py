"""A directory of files, of this server alone or shared with others."""
