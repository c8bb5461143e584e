#!/bin/sh
# Make the environment of the peers: benchmarks/setup.sh [DIRECTORY], .venv-bench by default.
#
# All of them live in one environment, at the exact versions of constraints.txt. One that cannot be installed is
# skipped with a line: compare.py then leaves it out. PYTHON names the interpreter to make the environment with.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
env=${1:-"$here/../.venv-bench"}
pins="$here/constraints.txt"
peers="cpprb torchrl stable-baselines3 tianshou flashbax"

[ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env"

install() {
    "$env/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

# torch first, named exactly, and before all that depend on it: otherwise another build of it is fetched.
install --constraint "$pins" numpy
install --constraint "$pins" torch==2.13.0 || echo "setup: torch could not be installed; most peers need it" >&2

for peer in $peers; do
    if install --constraint "$pins" "$peer"; then
        echo "setup: $peer is there"
    else
        echo "setup: $peer could not be installed, skipped" >&2
    fi
done
