#!/usr/bin/env bash
# Make .venv from the pinned requirement files, once: setup_env.sh quickstart | test | benchmark   (PYTHON=... names an interpreter)
# A stamp inside .venv holds the hash of what was installed; as long as it fits, a call does nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

kind=${1:-quickstart}
kinds=(quickstart test benchmark) # each holds all before it
[[ " ${kinds[*]} " == *" $kind "* ]] || { echo "setup_env: unknown kind '$kind': use quickstart, test or benchmark" >&2; exit 2; }

files_of() {
    local files=(requirements/quickstart.txt)
    if [[ $1 != quickstart ]]; then files+=(requirements/test.txt requirements/sglang-cpu.txt); fi
    if [[ $1 == benchmark ]]; then files+=(requirements/benchmark.txt); fi
    echo "${files[@]}"
}
hash_of() {
    local files
    read -ra files <<<"$(files_of "$1")"
    cat "${files[@]}" pyproject.toml tools/setup_env.sh | sha256sum | cut -c1-64
}

stamp=.venv/installed-$kind
if [[ -x .venv/bin/python && -f $stamp && $(<"$stamp") == "$(hash_of "$kind")" ]]; then exit 0; fi

# A python3.12 on the path may be a shim that refuses to run: what counts is whether it answers.
is_312() { [[ -n $1 ]] && "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; }
find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.12 python3 \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python \
        "$HOME"/.local/share/uv/python/cpython-3.12*/bin/python3.12 \
        /usr/local/bin/python3.12 /usr/bin/python3.12 /opt/python*/bin/python3.12; do
        if is_312 "$candidate"; then command -v "$candidate"; return; fi
    done
    return 1
}

if ! is_312 .venv/bin/python; then
    python=$(find_python) || {
        echo "setup_env: no working Python 3.12 found; install one (for example 'uv python install 3.12' or 'pyenv install 3.12') or set PYTHON=/path/to/python3.12" >&2
        exit 2
    }
    free=$(df -Pm . | awk 'NR == 2 { print $4 }')
    if ((free < 8000)); then
        echo "setup_env: $free MB free here, the environment needs about 6000; make room first" >&2
        exit 2
    fi
    echo "setup_env: making .venv with $python"
    rm -rf .venv
    "$python" -m venv .venv
fi

pip() {
    local log=.venv/pip.log
    if ! .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@" >"$log" 2>&1; then
        tail -n 15 "$log" >&2
        echo "setup_env: pip install $* failed (all it said: $log)" >&2
        exit 1
    fi
}

rm -f .venv/installed-*
# Every file is a full set of pins, so no resolver is needed, and a later file can change nothing an earlier one installed.
read -ra files <<<"$(files_of "$kind")"
for file in "${files[@]}"; do
    echo "setup_env: installing $file ($(grep -vc '^#' "$file") packages)"
    pip --no-deps -r "$file"
done
pip --no-deps --no-build-isolation --editable .
for installed in "${kinds[@]}"; do
    hash_of "$installed" >".venv/installed-$installed"
    if [[ $installed == "$kind" ]]; then break; fi
done
