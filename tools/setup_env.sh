#!/usr/bin/env bash
# Create or refresh the pinned environment, or check one that the user has. Called by the Makefile.
#
#   tools/setup_env.sh                 .venv from requirements.lock, this project installed in place
#   tools/setup_env.sh --check ENV     the imports that this project needs, in the environment ENV
#
# PYTHON=/path/to/python3.10 chooses the interpreter that .venv is made from.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

root=$(pwd -P)
venv=.venv
python=$venv/bin/python
# "unfinished" while an installation runs; afterwards all that the installation came from.
stamp=$venv/.moco_d2_setup

die() {
    printf 'moco_d2: %s\n' "$1" >&2
    exit 1
}

# An environment holds absolute paths, so its place belongs to what it came from.
recipe() {
    printf '%s\n' "$root"
    cat requirements.lock setup.py
}

# A candidate counts only if it runs: version managers put a python3.10 on PATH that may not.
is_python310() {
    "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 10))' </dev/null >/dev/null 2>&1
}

find_python310() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        is_python310 "$PYTHON" || die "PYTHON=$PYTHON does not run as Python 3.10, which the pinned \
environment needs: name one with PYTHON=/path/to/python3.10."
        printf '%s\n' "$PYTHON"
        return
    fi
    for candidate in python3.10 "$(uv python find --system --no-python-downloads 3.10 2>/dev/null || true)" \
        python3 python; do
        if [[ -n $candidate ]] && is_python310 "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    die "no Python 3.10 found, which the pinned environment needs: install it (for instance with \
\`uv python install 3.10\` or \`pyenv install 3.10\`) or name one with \
\`make PYTHON=/path/to/python3.10 setup\`."
}

have_uv() {
    command -v uv >/dev/null 2>&1
}

create_venv() {
    local base
    base=$(find_python310)
    # Where it really is: neither another environment, nor a name that uv may read differently.
    base=$("$base" -c 'import os, sys; print(os.path.realpath(sys.executable))')
    if ! have_uv && ! "$base" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        die "$base cannot make virtual environments: install its venv package (on Debian and \
Ubuntu: apt-get install python3.10-venv) or uv."
    fi
    # The mark is made first, so that an environment whose creation was interrupted is known.
    rm -rf "$venv"
    mkdir "$venv"
    echo unfinished >"$stamp"
    if have_uv; then
        uv venv --quiet --allow-existing --no-python-downloads --python "$base" "$venv"
    else
        "$base" -m venv "$venv"
    fi
}

# Dependencies are not resolved: the lock names every package. Builds use the environment's own
# setuptools rather than the newest one from the index.
install() {
    if have_uv; then
        # Compiled now, as pip does, and not again by every process of a read-only or strict machine.
        uv pip install --python "$python" --no-deps --no-build-isolation --compile-bytecode "$@"
    else
        "$python" -m pip install --disable-pip-version-check --no-input --no-deps \
            --no-build-isolation "$@"
    fi
}

# The part of the lock that builds the packages which come as source, and a pip that is known.
build_tools() {
    awk '/^[^ #]/ { wanted = /^(packaging|pip|setuptools|wheel)==/ } wanted' requirements.lock
}

install_pinned() {
    if ! have_uv; then
        "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null
    fi
    build_tools >"$venv/build_tools.lock"
    install --require-hashes --requirement "$venv/build_tools.lock"
    install --require-hashes --requirement requirements.lock
    install --editable .
}

setup() {
    [[ -f $stamp && $(recipe) == "$(<"$stamp")" ]] && is_python310 "$python" && return
    [[ $(uname -s) == Linux && $(uname -m) == x86_64 ]] || die "the pinned environment holds \
detectron2 compiled for Linux on x86-64, this is $(uname -s) on $(uname -m): build detectron2 from \
source in an environment of your own and use it with \`make VENV=/path/to/env …\` (see README.md)."

    # Two terminals may start at once; the second waits and then finds the work done.
    if [[ -z ${MOCO_D2_SETUP_LOCKED:-} ]] && command -v flock >/dev/null 2>&1; then
        MOCO_D2_SETUP_LOCKED=1 exec flock requirements.lock tools/setup_env.sh
    fi
    # Interrupted, moved here from elsewhere, or without a Python that runs: start anew.
    if [[ -f $stamp && $(head -n 1 "$stamp") != "$root" ]] || ! "$python" -c '' 2>/dev/null; then
        create_venv
    elif ! is_python310 "$python"; then
        die "$venv holds another Python than 3.10: remove it (rm -r $venv), or use it as it is \
with \`make VENV=$venv …\`."
    fi
    echo "moco_d2: installing the pinned environment into $venv (once; some 2.5 GB to download)"
    echo unfinished >"$stamp"
    install_pinned
    recipe >"$stamp.new"
    mv "$stamp.new" "$stamp"
}

check() {
    local env=$1 problem
    [[ -x $env/bin/python ]] || die "VENV=$env is no environment: there is no $env/bin/python."
    problem=$(PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} "$env/bin/python" - 2>&1 <<'EOF'
import importlib
import sys

if sys.version_info < (3, 10):
    sys.exit(f"runs Python {sys.version.split()[0]}, which is older than 3.10")
for module in ["moco_d2", "torch", "torchvision", "detectron2._C", "cv2"]:
    try:
        importlib.import_module(module)
    except Exception as error:
        sys.exit(f"cannot import {module} ({' '.join(str(error).split())})")
EOF
    ) || die "VENV=$env $(tail -n 1 <<<"$problem"). Put that right there (see \
README.md), or leave VENV out for the pinned environment."
}

case ${1:-} in
    "") setup ;;
    --check) check "${2:?--check needs the path of an environment}" ;;
    *) die "unknown argument $1: give nothing, or --check ENV." ;;
esac
