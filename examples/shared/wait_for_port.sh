#!/bin/sh
# Waits until a process of this machine listens on a port. Usage: wait_for_port.sh PORT PID
set -eu
until python3 -c 'import socket, sys; socket.create_connection(("127.0.0.1", int(sys.argv[1])), 2)' "$1" 2>/dev/null; do
    kill -0 "$2" 2>/dev/null || { echo "process $2 has ended before it listened on port $1; is the port taken?" >&2; exit 1; }
    sleep 0.2
done
