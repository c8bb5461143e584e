#!/usr/bin/env bash
# Run a command beside four busy loops and a program that makes and removes names in /dev/shm.
# Usage: scripts/busy.sh make test
set -euo pipefail
[ $# -gt 0 ] || { echo "usage: scripts/busy.sh COMMAND [ARGUMENT ...]" >&2; exit 2; }

loads=()
end_loads() { kill "${loads[@]}" 2>/dev/null || true; rm -f "/dev/shm/busy-$$-"*; }
trap end_loads EXIT

for _ in 1 2 3 4; do
  (while :; do :; done) &
  loads+=($!)
done
(
  n=0
  while :; do
    name=/dev/shm/busy-$$-$((n % 50))
    if [ -e "$name" ]; then rm -f "$name"; else echo "$n" >"$name"; fi
    n=$((n + 7))
    read -rt 0.02 <> <(:) || true  # sleeps without starting a process
  done
) &
loads+=($!)

"$@"
