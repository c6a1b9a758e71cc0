#!/usr/bin/env bash
# Makes .client-venv: the tinker SDK and the unmodified cookbook, apart from the server's environment.
# Running it again is quick and changes nothing. PIP_FIND_LINKS may name a folder with wheels.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.client-venv
wanted=$(cat client_examples/requirements.txt client_examples/setup.sh | sha256sum | cut -d' ' -f1)
if [ "$(cat $venv/.verl-tinker 2>/dev/null || true)" = "$wanted" ]; then
    echo "client environment: $venv is up to date"
    exit 0
fi
step() { echo "client environment: $1"; shift; "$@" || { echo "client environment: this step failed: $*" >&2; exit 1; }; }
python=${PYTHON:-python3.11}
command -v "$python" >/dev/null || python=python3
step "making $venv with $($python --version)" "$python" -m venv "$venv"
step "installing uv" "$venv/bin/pip" install --quiet --disable-pip-version-check uv
if [ -n "${PIP_FIND_LINKS:-}" ]; then torch=(--find-links "$PIP_FIND_LINKS"); else torch=(--torch-backend cpu); fi
step "installing the cookbook's dependencies" \
    "$venv/bin/uv" pip install --quiet --compile-bytecode --python "$venv/bin/python" "${torch[@]}" -r client_examples/requirements.txt
step "installing tinker-cookbook" \
    "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps tinker-cookbook==0.6.1
echo "$wanted" > $venv/.verl-tinker
