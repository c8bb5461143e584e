#!/usr/bin/env bash
# Build the core under each sanitizer and run its tests there. Usage: scripts/sanitize.sh [pytest arguments]
#
# The interpreter is not instrumented, so the sanitizer's runtime is preloaded into it. libstdc++ is preloaded
# too: Python loads it late, and the runtime must find the C++ throw it intercepts when it starts.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
cxx=${CXX:-g++}
export OPENBLAS_NUM_THREADS=1                 # numpy's own threads are not ours to check
# The interpreter never frees what lives as long as it does; what cannot be allocated is an error, not the end.
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export TSAN_OPTIONS=halt_on_error=1:die_after_fork=0:allocator_may_return_null=1:suppressions=$PWD/scripts/tsan.supp

library() { "$cxx" -print-file-name="$1"; }

check() {
  local sanitizer=$1 runtime=$2
  shift 2
  local name=${sanitizer//,/-}
  local dir=build/sanitize/$name
  echo "== $sanitizer"
  "$python" -m pip install --quiet --no-build-isolation --no-deps --upgrade --target "$dir/site" \
    -C build-dir="$dir/cmake" -C cmake.build-type=RelWithDebInfo -C install.strip=false \
    -C cmake.define.RECOLLECT_SANITIZE="$sanitizer" .
  # setarch -R: gcc 12's ThreadSanitizer cannot place its shadow under today's address randomisation.
  PYTHONPATH=$dir/site LD_PRELOAD="$(library "$runtime") $(library libstdc++.so.6)" \
    setarch -R "$python" -X faulthandler -m pytest tests/core tests/sampling/test_meanwhile.py tests/replay/test_one_moment.py -p no:cacheprovider --timeout=600 \
    -o faulthandler_timeout=700 --capture=sys "$@"  # not fd: a report must reach the terminal
}

check thread libtsan.so "$@"
check address,undefined libasan.so "$@"
