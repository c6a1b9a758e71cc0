# Shell functions of install_verl.sh: find Python, run a step, skip what is done.

STAMP=.installed

find_python() {  # VERSION...: the first of these that works
    local version candidate
    for candidate in ${PYTHON:-} $(printf 'python%s ' "$@") python3 python; do
        for version in "$@"; do
            if "$candidate" -c "import sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; then
                echo "$candidate"
                return
            fi
        done
    done
    echo "no Python $(echo "$@" | sed 's/ / or /g') was found; install one, or name it in PYTHON" >&2
    return 1
}

step() {  # TEXT COMMAND...: run it, and say which step failed and why
    local text="$1" log status=0
    shift
    echo "== $text"
    log="$(mktemp)"
    "$@" >"$log" 2>&1 || status=$?
    if [ "$status" != 0 ]; then
        tail -n 40 "$log" >&2
        echo "FAILED (exit status $status): $text" >&2
    else
        grep '^  ' "$log" || true
    fi
    rm -f "$log"
    return "$status"
}

install_set() {  # VENV DEVICE FILE: exactly the pinned set; the file is complete, so nothing has to be resolved
    # Compiled at once, so that no start of the server has to; an import of vLLM alone takes 20 s without.
    local options=() folder
    for folder in ${PIP_FIND_LINKS:-}; do options+=(--find-links "$folder"); done
    # With a local wheel folder torch comes from there; otherwise uv knows where the CPU builds are.
    if [ "$2" = cpu ] && [ -z "${PIP_FIND_LINKS:-}" ]; then options+=(--torch-backend cpu); fi
    UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-300}" "$1/bin/uv" pip install --python "$1/bin/python" --compile-bytecode --no-deps "${options[@]}" -r "$3"
}

fingerprint() {  # FILE...: of everything that decides what gets installed, and where
    { pwd; cat "$@" requirements/uv.txt pyproject.toml tools/*; } | sha256sum | cut -d' ' -f1
}

is_current() {  # VENV FILE...
    local venv="$1"
    shift
    [ -x "$venv/bin/python" ] && "$venv/bin/python" -c '' 2>/dev/null && [ "$(cat "$venv/$STAMP" 2>/dev/null)" = "$(fingerprint "$@")" ]
}

mark_current() {  # VENV FILE...
    local venv="$1"
    shift
    fingerprint "$@" >"$venv/$STAMP"
}
