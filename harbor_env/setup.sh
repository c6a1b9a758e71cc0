#!/usr/bin/env bash
# Makes the environments of a $TASK folder; running it again is quick and changes nothing.
#   setup.sh runtime [--gpu-check]         runtime-venv: the server (install_verl.sh's .venv)
#   setup.sh control [--without-services]  control-venv: Tinker SDK, cookbook and ROCK's SDK, over client_examples' environment;
#                                          rock-venv: ROCK's own services, which pin another Ray; dist/: the rl-rock wheel
#   setup.sh sandbox                       sandbox-venv: what runs inside a sandbox, for tests without containers
# PIP_FIND_LINKS may name a folder with wheels.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"; repo="$(dirname "$here")"
part="${1:-}"; shift || true
[ -n "${TASK:-}" ] || { echo "setup.sh: TASK is not set; export TASK=/an/absolute/path of a new folder" >&2; exit 2; }
case "$TASK" in /*) ;; *) echo "setup.sh: TASK is $TASK; it must be an absolute path" >&2; exit 2;; esac
mkdir -p "$TASK/logs"

step() { echo "setup: $1"; shift; "$@" || { echo "setup: this step failed: $*" >&2; exit 1; }; }
uv() { UV_HTTP_TIMEOUT=300 "$repo/.client-venv/bin/uv" --quiet "$@" 2> >(grep -v -e pyenv -e "Failed to inspect" >&2 || true); }

client() { step "the client's environment" "$repo/client_examples/setup.sh"; }

# made VENV FILES...: has VENV been made from these files?
stamp() { (echo "$repo"; cat "$@" "${BASH_SOURCE[0]}") | sha256sum | cut -d' ' -f1; }
made() { [ "$(cat "$1/.verl-tinker" 2>/dev/null || true)" = "$(stamp "${@:2}")" ]; }

control_venv() {
    local venv="$TASK/control-venv" wanted="$here/requirements.txt"
    made "$venv" "$wanted" && { echo "setup: $venv is up to date"; return; }
    step "making $venv" "$repo/.client-venv/bin/python" -m venv --clear --without-pip "$venv"
    local site; site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    "$repo/.client-venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/client.pth"
    echo "$repo" >> "$site/client.pth"
    step "installing ROCK's SDK" uv pip install --no-deps --compile-bytecode --python "$venv/bin/python" -r "$wanted"
    "$venv/bin/python" -m harbor_env.import_check > "$venv/import-check.json" || { cat "$venv/import-check.json" >&2; exit 1; }
    stamp "$wanted" > "$venv/.verl-tinker"
}

plain_venv() {  # NAME: an environment of its own from NAME.txt
    local venv="$TASK/$1-venv" wanted="$here/$1.txt"
    made "$venv" "$wanted" && { echo "setup: $venv is up to date"; return; }
    step "making $venv" "$repo/.client-venv/bin/python" -m venv --clear --without-pip "$venv"
    step "installing what $1 needs" uv pip install --no-deps --compile-bytecode --python "$venv/bin/python" -r "$wanted"
    stamp "$wanted" > "$venv/.verl-tinker"
}

wheel() {
    compgen -G "$TASK/dist/rl_rock-*.whl" > /dev/null && return
    mkdir -p "$TASK/dist"
    step "fetching the rl-rock wheel" "$repo/.client-venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps \
        --only-binary=:all: "$(grep '^rl-rock==' "$here/requirements.in")" -d "$TASK/dist"
}

case "$part" in
runtime)
    step "the server's environment" "$repo/install_verl.sh"
    ln -sfn "$repo/.venv" "$TASK/runtime-venv"
    "$TASK/runtime-venv/bin/python" "$here/runtime_check.py" "$@" | tee "$TASK/runtime-venv/setup-public-runtime.json";;
control)
    client; control_venv; wheel
    [ "${1:-}" = --without-services ] || plain_venv rock;;
sandbox)
    client; plain_venv sandbox;;
*)
    sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2;;
esac
