"""What every long-running process of ours does alike: start, tasks, HTTP port, signals, end."""
