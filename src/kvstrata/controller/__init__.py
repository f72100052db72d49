"""The cluster's controller: which instance lives, what it holds, what it is asked to do. Never on the data path."""
