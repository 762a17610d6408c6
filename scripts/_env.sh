# Sourced by scripts/demo and scripts/test: makes the virtual environment in .venv and the patched
# library in the user's cache, both once. Writes nowhere else, but for Debian packages when root.

set -euo pipefail
CALLER_DIR=$PWD
# paths are the caller's
[[ ${PYTHON:-} != */* ]] || PYTHON=$(realpath -s -- "$PYTHON")
[[ -z ${KVSHARE_CACHE:-} ]] || export KVSHARE_CACHE=$(realpath -m -- "$KVSHARE_CACHE")
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

N_STEPS=5
SETUP_LOG=.venv/kvshare-setup.log

fail() {
    echo "error: $1" >&2
    echo "hint: $2" >&2
    exit 2
}

# step N NAME COMMAND...: run quietly, show the time; on failure show the end of the log
step() {
    local n=$1 name=$2 start=$SECONDS
    shift 2
    printf '[%d/%d] %s ... ' "$n" "$N_STEPS" "$name" >&2
    if ! "$@" >"$SETUP_LOG" 2>&1 </dev/null; then
        echo "failed" >&2
        tail -n 15 "$SETUP_LOG" >&2
        fail "$name failed" "the whole log is $SETUP_LOG; run the command again to go on from here"
    fi
    echo "$((SECONDS - start)) s" >&2
}

find_python() {
    local candidate candidates=(python3 python3.14 python3.13 python3.12 python3.11 python3.10)
    [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.10 or newer" "install python3, or name one: PYTHON=/path/to/python3 $0"
}

missing_packages() {
    command -v cmake >/dev/null || echo cmake
    command -v ninja >/dev/null || command -v make >/dev/null || echo ninja-build
    command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || echo g++
    "$1" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
    local tool
    for tool in ${NEEDED_TOOLS:-}; do # of Debian packages of the same name
        command -v "$tool" >/dev/null || echo "$tool"
    done
}

require_root_for() {
    if [[ $(id -u) -ne 0 ]] || ! command -v apt-get >/dev/null; then
        fail "these Debian packages are missing: $*" \
            "run \`apt-get update && apt-get install -y $*\` as root, then $0 again"
    fi
}

install_packages() {
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq # a stale list is often good enough, so the next line decides
    apt-get install -y -qq --no-install-recommends "$@"
}

is_venv_here() {
    .venv/bin/python -m pip --version >/dev/null 2>&1 && grep -qF "$PWD/.venv/bin/python" .venv/bin/pip
}

make_venv() {
    rm -rf .venv/bin .venv/lib .venv/lib64 .venv/include .venv/pyvenv.cfg
    "$PYTHON" -m venv .venv
}

install_kvshare() {
    .venv/bin/pip install -qq numpy psutil rich &&
        .venv/bin/pip install -qq --no-deps -e .
}

# Without a native build of their own: the library comes from the patched tree.
install_bindings() {
    local sdist
    sdist=$(.venv/bin/kvshare build --download-only) &&
        CMAKE_ARGS="-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF" .venv/bin/pip install -qq "$sdist"
}

# What decides whether .venv is up to date.
fingerprint() {
    cat pyproject.toml patches/UPSTREAM scripts/_env.sh | sha256sum
}

PYTHON=$(find_python)
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
mkdir -p .venv

# one set-up at a time
exec 9>.venv/kvshare-lock
flock -n 9 || { echo "waiting for another set-up of this folder ..." >&2; flock 9; }

mapfile -t PACKAGES < <(missing_packages "$PYTHON")
if [[ ${#PACKAGES[@]} -gt 0 ]]; then
    require_root_for "${PACKAGES[@]}"
    step 1 "Debian packages: ${PACKAGES[*]}" install_packages "${PACKAGES[@]}"
fi
if ! is_venv_here; then
    rm -f .venv/kvshare-stamp
    step 1 "virtual environment in .venv" make_venv
fi
if [[ "$(cat .venv/kvshare-stamp 2>/dev/null)" != "$(fingerprint)" ]]; then
    step 2 "kvshare" install_kvshare
    step 3 "bindings, from the pinned source distribution" install_bindings
    step 4 "tools for the tests" .venv/bin/pip install -qq -e '.[test]'
    fingerprint >.venv/kvshare-stamp
fi
exec 9>&-

start=$SECONDS
echo "[5/$N_STEPS] patched libllama ..." >&2
library=$(.venv/bin/kvshare build)
echo "[5/$N_STEPS] $library, $((SECONDS - start)) s" >&2
