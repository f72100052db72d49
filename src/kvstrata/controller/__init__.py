"""The cluster's controller: it knows the instances and the chunks that they hold, and commands them; it moves no KV."""
